"""What earlier versions wrote is gone on with; what newer ones wrote is refused and left alone.

earlier/ holds what the code before formats of checkpoints and states were counted has written: two
runs that were interrupted at step 8 of 14, and the state_dict of each optimizer after three steps.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from refused import refused
from runfolders import Made, write_experiment, write_made_landscape
from safetensors.torch import load_file
from tiny import called, results, run_inline, state, tree
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from syngap import SynGAP
from syngap.bench.config.experiment import Experiment, Training, read
from syngap.bench.config.reading import FORMAT
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import make_plan
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.store.surface import read_landscapes
from syngap.bench.training import checkpoint
from syngap.optim import Ballistic, GatedOptimizer
from syngap.optim.parameter_state import VERSION

EARLIER = Path(__file__).with_name("earlier")
ROWS = ("er-0", "syngap-0")
INTERRUPTED = 8  # the step of their checkpoints
NEWER = FORMAT + 1
SAID = "written by a newer syngap"
WEIGHTS = "checkpoint/weights.safetensors"


@pytest.fixture(scope="module")
def earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interrupted runs of an earlier version, as it left them."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(EARLIER / "runs.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "runs"


@pytest.fixture
def earlier(earlier_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupted runs of an earlier version, in results/earlier."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(earlier_runs, tmp_path / "results/earlier")
    return tmp_path / "results/earlier"


@pytest.fixture(scope="module")
def resumed(earlier_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, after this version went on with them."""
    out = tmp_path_factory.mktemp("resumed") / "earlier"
    shutil.copytree(earlier_runs, out)
    plan = make_plan(
        Experiment.from_mapping(read(f"{out}/experiment.yaml")), out, if_there="resume"
    )
    assert [job.name for job in plan.jobs] == list(ROWS)
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch, plan.begin():
        patch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
        for job in plan.jobs:
            run_here(job, lambda step, accuracy: told.append(step))
    assert min(told) >= INTERRUPTED  # no run began again
    return out


@pytest.fixture
def gone_on(earlier: Path, resumed: Path) -> Path:
    """Those, in results/earlier."""
    return Path(shutil.copytree(resumed, earlier, dirs_exist_ok=True))


def change(path: Path, **values: Any) -> None:
    """Change what a YAML file says; None takes it out."""
    found = yaml.safe_load(path.read_text()) | values
    found = {key: value for key, value in found.items() if value is not None}
    path.write_text(yaml.safe_dump(found, sort_keys=False))


# Run folders of earlier versions ------------------------------------------------------------------


def test_an_interrupted_run_of_an_earlier_version_ends_where_one_of_this_version_does(
    earlier_runs: Path, gone_on: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new = set(Training.__dataclass_fields__) - set(
        yaml.safe_load((earlier_runs / "er-0/config.yaml").read_text())["training"]
    )
    assert {"deterministic", "channels_last", "compiled"} <= new
    whole = tmp_path / "whole"
    assert called(capsys, "run", gone_on / "experiment.yaml", "--out", whole)[0] == 0
    for row in ROWS:
        assert state(gone_on / row) == "done"
        before, after = (f / row / "metrics.jsonl" for f in (earlier_runs, gone_on))
        assert after.read_bytes().startswith(before.read_bytes())
        ended, fresh = (load_file(f / row / WEIGHTS) for f in (gone_on, whole))
        for name, value in fresh.items():  # another processor rounds otherwise
            torch.testing.assert_close(ended[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_runs_of_an_earlier_version_are_reported_kept_and_reproduced(
    gone_on: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, table, _ = called(capsys, "report", gone_on)
    assert code == 0
    assert "SynGAP" in table
    assert called(capsys, "keep", gone_on, tmp_path / "kept")[0] == 0
    code, said, _ = called(capsys, "reproduce", "earlier", "--out", tmp_path / "again")
    assert "recorded" in said
    assert code in (0, 1)  # a row may lie outside of the spread, of which one seed has none
    assert results(tmp_path / "again/er-0").keys() == results(gone_on / "er-0").keys()


def test_folders_from_before_formats_were_counted_are_read(
    earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in ROWS:
        change(earlier / row / "config.yaml", format=None)
    assert "format" not in yaml.safe_load((earlier / "experiment.yaml").read_text())
    command = ["run", earlier / "experiment.yaml", "--out", earlier, "--resume"]
    assert called(capsys, *command)[0] == 0
    assert called(capsys, "report", earlier)[0] == 0
    assert [run.done for run in read_runs(earlier)] == [True, True]


def test_what_is_written_now_says_its_format(gone_on: Path) -> None:
    experiment = yaml.safe_load((gone_on / "experiment.yaml").read_text())
    assert experiment["format"] == FORMAT
    assert Experiment.from_mapping(experiment).as_mapping() == experiment


# Of newer versions --------------------------------------------------------------------------------

COMMANDS = {
    "run": ["run", "results/earlier/experiment.yaml", "--out", "results/earlier"],
    "resume": ["run", "mine.yaml", "--out", "results/earlier", "--resume"],
    "report": ["report", "results/earlier"],
    "keep": ["keep", "results/earlier", "kept"],
    "reproduce": ["reproduce", "earlier"],
    "fill": ["fill", "page.md"],
    "landscape": ["landscape", "results/earlier/experiment.yaml", "--points", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_experiment_is_refused_by_every_command(
    command: str, gone_on: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(gone_on / "experiment.yaml", tmp_path / "mine.yaml")
    (tmp_path / "page.md").write_text("ER: <!-- results: value earlier er ACC -->?<!-- end -->\n")
    change(gone_on / "experiment.yaml", format=NEWER, unheard_of={"of": 1})
    before = tree(tmp_path)
    code, _, said = called(capsys, *COMMANDS[command])
    assert (code, said.count("\n")) == (2, 1), said
    assert f"{SAID} (format {NEWER}, this one reads {FORMAT}); upgrade syngap" in said
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", ["resume", "report", "keep", "reproduce", "fill"])
def test_a_newer_run_is_refused_by_every_command(
    command: str, gone_on: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(gone_on / "experiment.yaml", tmp_path / "mine.yaml")
    (tmp_path / "page.md").write_text("ER: <!-- results: value earlier er ACC -->?<!-- end -->\n")
    change(gone_on / "syngap-0/config.yaml", format=NEWER)
    before = tree(tmp_path)
    code, _, said = called(capsys, *COMMANDS[command])
    assert (code, said.count("\n")) == (2, 1), said
    assert "syngap-0/config.yaml" in said
    assert SAID in said
    assert tree(tmp_path) == before


def test_a_newer_checkpoint_is_refused_and_left_where_it_is(
    earlier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run leaves it that was resumed by a newer version; it would pass for a damaged one."""
    (path,) = (earlier / "er-0/checkpoint").iterdir()
    saved = checkpoint.unpack(path.read_bytes())
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "_KNOWN", checkpoint._KNOWN + 1)
        path.write_bytes(checkpoint.pack(saved))
    content = path.read_bytes()
    command = ["run", earlier / "experiment.yaml", "--out", earlier, "--resume"]
    code, _, said = called(capsys, *command)
    assert code == 1
    assert SAID in said
    assert path.read_bytes() == content
    assert [state(earlier / row) for row in ROWS] == ["failed", "done"]


def test_a_newer_landscape_is_refused(tmp_path: Path) -> None:
    write_experiment(tmp_path, {"er": Made("er")}, seeds=(0,))
    path = write_made_landscape(tmp_path / "landscapes", "er", "er")
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with refused(SAID, "landscape.json"):
        read_landscapes(tmp_path)


@pytest.mark.parametrize("said", ["two", 1.5, True, None, [1]])
def test_a_format_that_is_no_number_is_refused(said: Any, earlier: Path) -> None:
    path = earlier / "er-0/config.yaml"
    path.write_text(f"format: {json.dumps(said)}\n" + path.read_text().partition("\n")[2])
    with refused("config.yaml", "format"):
        read_runs(earlier)


# States of optimizers -----------------------------------------------------------------------------

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SynGAP": lambda model: SynGAP(model.parameters(), lr=0.1, momentum=0.5),
    "wrapped": lambda model: SynGAP.wrap(AdamW(model.parameters(), lr=0.1)),
    "Ballistic": lambda model: Ballistic(model.parameters(), lr=0.1),
}
STATES: dict[str, dict[str, Any]] = json.loads((EARLIER / "states.json").read_text())


def restored(told: Any) -> dict[str, Any]:
    """A state_dict from JSON, in which a tensor is its type and its values."""
    states = {
        int(index): {
            key: torch.tensor(values, dtype=getattr(torch, kind.removeprefix("torch.")))
            for key, (kind, values) in state.items()
        }
        for index, state in told["state"].items()
    }
    return {"state": states, "param_groups": told["param_groups"]}


def step(optimizer: Optimizer, model: nn.Module) -> None:
    torch.manual_seed(0)
    logits = model(torch.randn(4, 2))
    optimizer.zero_grad()
    if isinstance(optimizer, GatedOptimizer):
        optimizer.observe(logits)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()


@pytest.mark.parametrize("version", STATES)
@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_of_an_earlier_version_is_loaded_whole(kind: str, version: str) -> None:
    model = nn.Linear(2, 3)
    optimizer = MAKERS[kind](model)
    saved = restored(STATES[version][kind])
    assert all("version" not in group for group in saved["param_groups"])
    optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    for index, state_then in saved["state"].items():
        assert found["state"][index].keys() == state_then.keys()
        for key, value in state_then.items():
            assert torch.equal(found["state"][index][key], value), key
    (then,), (now,) = saved["param_groups"], found["param_groups"]
    assert {key: now[key] for key in then} == then
    assert now["version"] == VERSION
    step(optimizer, model)
    if isinstance(optimizer, GatedOptimizer):
        assert optimizer.has_importance
        assert now["steps"] == 3


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_says_its_version_which_loading_brings_up_to_date(kind: str) -> None:
    model = nn.Linear(2, 3)
    optimizer = MAKERS[kind](model)
    step(optimizer, model)
    saved = optimizer.state_dict()
    assert [group["version"] for group in saved["param_groups"]] == [VERSION]
    for group in saved["param_groups"]:
        group["version"] = VERSION - 1
    optimizer.load_state_dict(saved)
    assert [group["version"] for group in optimizer.param_groups] == [VERSION]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_of_a_newer_version_is_refused_and_changes_nothing(kind: str) -> None:
    model = nn.Linear(2, 3)
    optimizer = MAKERS[kind](model)
    step(optimizer, model)
    saved = optimizer.state_dict()
    step(optimizer, model)
    saved["param_groups"][0] |= {"version": VERSION + 1, "lr": 7.0}
    before = values(optimizer)
    with pytest.raises(ValueError, match=r"newer syngap \(version 2, this one reads 1\): upgrade"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for was, now in zip(before, values(optimizer), strict=True):
        assert torch.equal(was, now)


def values(optimizer: Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [value.clone() for state in states for value in state.values()]


@pytest.mark.parametrize(("kind", "other"), [("SynGAP", "wrapped"), ("wrapped", "SynGAP")])
def test_a_state_of_another_kind_is_told_by_what_it_says(kind: str, other: str) -> None:
    optimizer = MAKERS[kind](nn.Linear(2, 3))
    with pytest.raises(ValueError, match="the state_dict is of SynGAP"):
        optimizer.load_state_dict(restored(STATES["0.1.0"][other]))
