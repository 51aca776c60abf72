"""What the documentation shows works: examples run, commands parse, tables and links are right.

Every ```python block of a page runs, in order and in one namespace a page, beginning with what
`prelude` holds. A block after `<!-- not run: reason -->` does not run, and one after
`<!-- with PACKAGE -->` runs where that is installed. Where a block ends in an expression with its
value in a comment, the value is compared.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import unicodedata
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer.main
import yaml
from checkout import ROOT
from runfolders import write_experiment
from torch import Tensor, nn

import syngap
from syngap.bench import methods, models, streams
from syngap.bench.cli import app
from syngap.bench.config.experiment import (
    Experiment,
    Training,
    read,
    seeds_of,
    with_settings,
)
from syngap.bench.config.finetuning import parse_experiment
from syngap.bench.errors import UserError
from syngap.bench.options import signature
from syngap.bench.streams import Stream

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
PROGRAM: Any = typer.main.get_command(app)  # Any: typer brings a click of its own, or not

each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


class Block(NamedTuple):
    """A fenced block: its text, the line it begins at, why it is not run, what it has to have."""

    language: str
    text: str
    line: int
    not_run: str | None
    package: str | None


def blocks(page: Path, language: str) -> list[Block]:
    """Return the fenced blocks of `page` in `language`."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(
        r"(?:^<!-- (?:not run: (?P<why>.+?)|with (?P<package>\w+)) -->\n)?"
        r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return [
        Block(
            m["language"], m["text"], text.count("\n", 0, m.start("text")), m["why"], m["package"]
        )
        for m in found
        if m["language"] == language
    ]


def prose(page: Path) -> str:
    """Return `page` without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


class Network(nn.Module):
    """What a page means by `model` where it does not make one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).relu())
        return logits


def prelude() -> dict[str, Any]:
    """Return the names that a page may use without making them."""
    return {
        "__name__": "page",
        "torch": torch,
        "F": nn.functional,
        "SynGAP": syngap.SynGAP,
        "model": Network(),
        "stream": [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(3)],
        "inputs": torch.randn(16, 4),
        "known": torch.randn(16, 4),
        "new_data": [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(3)],
    }


# Pages

MOST_WORDS = 1500
EVIDENCE = {"found.md", "research.md"}  # every result, and every idea that was tried
each_short_page = pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name == "docs" and page.name not in EVIDENCE],
    ids=lambda page: page.stem,
)


def words(text: str) -> int:
    """Count the words of a text, without comments and targets of links."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(any(char.isalnum() for char in word) for word in text.split())


@each_short_page
def test_a_page_is_short(page: Path) -> None:
    assert words(prose(page)) <= MOST_WORDS


def test_who_is_in_a_hurry_reads_little() -> None:
    sections = [part for page in PAGES for part in re.split(r"^## ", prose(page), flags=re.M)]
    found = [words(part) for part in sections if part.startswith("In a hurry")]
    assert found
    assert max(found) <= 150


@each_short_page
def test_a_page_begins_with_what_its_reader_can_do_then(page: Path) -> None:
    if page.name not in ("api.md", "index.md"):  # a list of names, and the way to all pages
        first = page.read_text(encoding="utf-8").split("\n\n")[1]
        assert first.startswith(("After this page you can ", "After this page you know "))


# Python


@each_page
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in ("avalanche", "lightning", "transformers"):
        pytest.importorskip(page.stem)
    examples = blocks(page, "python")
    if any("runs/demo" in example.text for example in examples):
        write_experiment(tmp_path / "runs" / "demo", every=20)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = prelude()
    for example in examples:
        if example.not_run or (example.package and find_spec(example.package) is None):
            continue
        shown = _shown_value(example.text)
        tree = ast.parse("\n" * example.line + example.text, str(page))
        last = tree.body.pop() if shown is not None else None
        exec(compile(tree, str(page), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(page), "eval"), names)
            assert value == shown, f"{page.name}, line {last.lineno}"


def _shown_value(text: str) -> Any:
    """Return the value that the comment on the last line gives, None where it gives none."""
    last = text.rstrip().rpartition("\n")[2]
    if not isinstance(ast.parse(text).body[-1], ast.Expr) or "  # " not in last:
        return None
    try:
        return ast.literal_eval(last.rpartition("  # ")[2])
    except (SyntaxError, ValueError):
        return None


def test_examples_that_do_not_run_are_few_and_say_why() -> None:
    skipped = [
        (page.name, example.not_run)
        for page in PAGES
        for language in ("python", "sh")
        for example in blocks(page, language)
        if example.not_run
    ]
    assert len(skipped) <= 3, skipped


# Commands


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield the `syngap` commands in the shell blocks of `page`, and whether they can be run."""
    for block in blocks(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["syngap"]:
                yield words[1 : words.index(">") if ">" in words else None], not block.not_run


def subcommand(name: str) -> Any:
    assert name in PROGRAM.commands, f"there is no syngap {name}"
    return PROGRAM.commands[name]


def options(command: Any) -> set[str]:
    return {"--help", *(name for p in command.params for name in p.opts if name.startswith("-"))}


@each_page
def test_commands_parse_and_their_experiments_are_sound(page: Path) -> None:
    written = [yaml.safe_load(block.text) for block in blocks(page, "yaml")]
    for words, runs in commands(page):
        if words[0].startswith("-"):
            assert words[0] in options(PROGRAM)
            continue
        given = subcommand(words[0]).make_context(words[0], words[1:]).params
        if words[0] in ("run", "tune", "demo") and runs:
            _check_experiment(given, {f"{one.get('name')}.yaml": one for one in written})


def _check_experiment(given: dict[str, Any], written: dict[str, Any]) -> None:
    name = given.get("experiment", "digits")
    raw = written[name] if name in written else read(name)
    experiment = parse_experiment(with_settings(raw, given.get("settings") or ()))
    rows = given["methods"].split(",") if given["methods"] else None
    experiment.select(rows, seeds_of(given["seeds"]) if given.get("seeds") else None)


@each_page
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    known = options(PROGRAM)
    for command in PROGRAM.commands.values():
        known |= options(command)
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        words = code.split()
        mentioned = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
        if words[0] == "syngap" and len(words) > 1:
            group = words[1].startswith("-")
            allowed = options(PROGRAM if group else subcommand(words[1]))
            assert mentioned <= allowed, code
        elif words[0].startswith("--"):
            assert mentioned <= known, code


def test_every_command_is_explained() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, command in PROGRAM.commands.items():
        assert f"syngap {name}" in text, name
        for option in options(command) - {"--help"}:
            assert option in text, f"syngap {name} {option}"


@each_page
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(block.text for block in blocks(page, "sh"))
    used = {*re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)}
    used |= {*re.findall(r"`make ([a-z-]+)`", prose(page))}
    assert used <= targets


@each_page
def test_configurations_are_sound(page: Path) -> None:
    for block in blocks(page, "yaml"):
        given = yaml.safe_load(block.text)
        if "methods" in given:
            parse_experiment(given)
        else:  # a run's config.yaml
            asked = {key: given[key] for key in ("stream", "model", "training")}
            asked |= {"name": given["experiment"], "seeds": [given["seed"]]}
            method = dict(given["method"])
            asked["methods"] = {given["row"]: {"method": method.pop("name"), **method}}
            (run,) = Experiment.from_mapping(asked).runs()
            assert run.as_mapping() == given


# Tables of options

_REPLAYING = ("er_ace", "derpp", "agem", "cls_er", "scr", "ewcpp", "si", "mas", "lwf", "syngap")
_SHARED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_REPLAYING, ("er",)),
    "gated_er_ace": ("er", "syngap"),
    "gated_derpp": ("er", "derpp", "syngap"),
}


def tables(page: str) -> dict[str, dict[str, Any]]:
    """Return by heading the options in the tables of `page`, with their defaults."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0].strip("`")
        table = section.partition("| option | default |")[2].partition("\n\n")[0]
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
        found[heading] = {name: _default(text.strip()) for name, text in rows}
    return found


def _default(text: str) -> Any:
    if text == "required":
        return inspect.Parameter.empty
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value  # YAML reads 1e-16 as text
    except ValueError:
        return value


def defaults(function: Any) -> dict[str, Any]:
    return {name: default for name, (_, default) in signature(function).items()}


BUILTIN_METHODS = [
    name
    for name in methods.registry.names()
    if methods.registry.get(name).__module__.startswith("syngap.")
]


@pytest.mark.parametrize("name", BUILTIN_METHODS)
def test_options_of_methods_are_as_documented(name: str) -> None:
    found = tables("methods.md")
    said: dict[str, Any] = {}
    for section in (*_SHARED.get(name, ()), name):
        said |= found[section]
    assert said == defaults(methods.registry.get(name))


@pytest.mark.parametrize("name", ["digits", "cifar100", "core50", "folder", "npz"])
def test_options_of_streams_are_as_documented(name: str) -> None:
    assert tables("streams.md")[name] == defaults(streams.registry.get(name))


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18"])
def test_options_of_models_are_as_documented(name: str) -> None:
    assert tables("models.md")[name] == defaults(models.registry.get(name))


def test_options_of_order_and_training_are_as_documented() -> None:
    assert tables("streams.md")["Order"] == defaults(Stream)
    assert tables("training.md")["Options"] == defaults(Training)


# Links


def slug(heading: str) -> str:
    """Return the anchor that MkDocs gives a heading."""
    plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain.decode()).strip().lower())


def anchors(page: Path) -> set[str]:
    text = prose(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {*map(slug, headings), *re.findall(r"^::: (\S+)$", text, re.MULTILINE)}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if page.parent.name == "docs":  # the site is built from that folder alone
            assert place.is_relative_to(ROOT / "docs"), target
        if anchor:
            assert anchor in anchors(place), target


PATH = re.compile(r"`((?:[a-z_]+/)+\w+\.(?:py|yaml|css|html|ipynb|csv))`")
FOLDERS = (ROOT, ROOT / "src/syngap", ROOT / "src/syngap/bench", ROOT / "tests")


@each_page
def test_files_of_the_project_named_in_the_text_exist(page: Path) -> None:
    """A path is ours where its first folder is; src/ has other packages in other projects."""
    for name in PATH.findall(prose(page)):
        first = "src/syngap" if name.startswith("src/") else name.partition("/")[0]
        ours = name.startswith(first) and any((folder / first).is_dir() for folder in FOLDERS)
        if ours and "NAME" not in name:
            assert any((folder / name).exists() for folder in FOLDERS), name


def test_every_page_is_in_the_navigation_and_the_api_is_there() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in settings, page.name
    for target in anchors(ROOT / "docs" / "api.md"):
        if target.startswith("syngap.") and not _lacks_its_framework(target):
            _importable(target)


def test_search_needs_no_server_and_nothing_is_fetched_for_it() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "offline" in settings["plugins"]
    (shim,) = settings["extra"]["polyfills"]
    assert "iframe-worker" in shim  # by that name the plugin knows that it need not fetch its own
    assert (ROOT / "docs" / shim).is_file()


def _lacks_its_framework(target: str) -> bool:
    """Whether a target is an adapter to a package that is not installed here."""
    parts = target.split(".")
    return parts[1] == "integrations" and find_spec(parts[2]) is None


def _importable(target: str) -> None:
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = __import__(".".join(parts[:length]), fromlist=["_"])
        except ImportError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return
    raise AssertionError(f"{target} cannot be imported")


# This test itself


_COMPLAINTS = typer.BadParameter.__mro__[:3]  # the parser's own: usage errors of every kind


def test_a_wrong_command_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for wrong in (
        "syngap run digits --sed 3",
        "syngap runn digits",
        "syngap run digits --set stream.epoch=3",
        "syngap run digits --methods sgdd",
        "syngap data mnist",
    ):
        page.write_text(f"```sh\n{wrong}\n```\n")
        with pytest.raises((UserError, AssertionError, *_COMPLAINTS)):
            test_commands_parse_and_their_experiments_are_sound(page)
