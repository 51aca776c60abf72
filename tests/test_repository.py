import re
import shutil
import subprocess
from importlib import metadata, resources
from pathlib import Path

import pytest

import syngap

ROOT = Path(__file__).resolve().parents[1]
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|farm|tmp|root|home)/")


def test_installed_version_is_the_package_version() -> None:
    try:
        installed = metadata.version("syngap")
    except metadata.PackageNotFoundError:
        pytest.skip("syngap is imported from source, not installed")
    assert installed == syngap.__version__


def test_package_ships_its_types() -> None:
    assert resources.files(syngap).joinpath("py.typed").is_file()


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    offenders = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        offenders += [
            f"{name}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if MACHINE_PATH.search(line)
        ]
    assert not offenders
