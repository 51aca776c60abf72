"""What stands beside the package agrees with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT

import syngap

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_citation_is_of_this_version_and_licence() -> None:
    cited = read(ROOT / "CITATION.cff")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert cited["version"] == syngap.__version__
    assert f'license = "{cited["license"]}"\n' in project


def test_hooks_check_what_lint_checks() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    checks = re.findall(r'^\t"\$\(BIN\)/([\w-]+)"(.*)$', recipe, re.MULTILINE)
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"  # another would be fetched
    assert [hook["entry"] for hook in repo["hooks"]] == [tool + rest for tool, rest in checks]
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_are_forms(form: Path) -> None:
    """GitHub drops a form that lacks a name or a description, or has two fields of one id."""
    content = read(form)
    assert {"name", "description", "body"} <= set(content)
    names = [field["id"] for field in content["body"]]
    assert len(names) == len(set(names))
    assert any(field.get("validations", {}).get("required") for field in content["body"])
    for field in content["body"]:
        assert field["type"] in {"input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
        assert all(isinstance(o, str | dict) for o in field["attributes"].get("options", ()))


def test_there_are_issue_forms() -> None:
    assert {form.stem for form in FORMS} == {"bug", "method", "results"}


def test_the_sdist_has_what_make_installs_from() -> None:
    """A Makefile without the files that it names would be of no use."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    included = project.partition("only-include = [")[2].partition("]")[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {*re.findall(r"[\w-]*requirements\.txt|constraints\.txt", makefile)}
    assert len(named) > 2
    assert named <= {*re.findall(r'"(.+)"', included)}
