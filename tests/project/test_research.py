"""The method of research/ is the package's where its options say so, and averages as it says."""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from helpers import assert_identical
from rerun import Rerun
from tiny import SEARCH, written
from torch import Tensor, nn

from syngap import bench
from syngap.bench.config.experiment import read
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.derpp import DERpp
from syngap.bench.methods.er import ER
from syngap.bench.methods.er_ace import ERACE
from syngap.bench.methods.gated_losses import GatedDERpp, GatedERACE
from syngap.bench.methods.syngap import SynGAP
from syngap.bench.options import checked, signature
from syngap.bench.store.search_record import read_record
from syngap.bench.streams import Batch
from syngap.bench.training.capture import CapturedMethod
from syngap.optim.scores import sample_labels

RESEARCH = ROOT / "research"
EXPERIMENTS = (*RESEARCH.glob("*.yaml"), *ROOT.glob("results/research-*/experiment.yaml"))
if not RESEARCH.is_dir():
    pytest.skip("there is no research/ beside the tests", allow_module_level=True)
sys.path[:0] = [str(RESEARCH / part) for part in ("src", "", "protection")]

import average  # noqa: E402
import parts  # noqa: E402
from syngap_research.kronecker import Kronecker  # noqa: E402
from syngap_research.metaplastic import Metaplastic  # noqa: E402

KEPT: dict[str, Any] = {"lr": 0.3, "buffer": 10, "replay": 4}


def learner() -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Learner(model, lambda x, generator: x)


def learned(method: Method, steps: int = 30) -> list[list[Tensor]]:
    """Return the network's parameters after every step."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        method.step(Batch(torch.randn(6, 4), torch.randint(3, (6,))))
        found.append([value.detach().clone() for value in method.learner.model.parameters()])
    return found


@pytest.mark.parametrize(
    ("kind", "own", "options"),
    [
        (SynGAP, {"every": 1}, {}),
        (SynGAP, {"every": 1, "scope": "tensor"}, {"mean": "tensor"}),
        (ER, {}, {"rule": "none"}),
        (ERACE, {}, {"rule": "none", "loss": "ace"}),
        (DERpp, {}, {"rule": "none", "loss": "derpp"}),
        (GatedERACE, {"every": 1}, {"loss": "ace"}),
        (GatedDERpp, {"every": 1}, {"loss": "derpp"}),
    ],
)
def test_it_is_the_method_that_its_options_name(
    kind: type[Method], own: dict[str, Any], options: dict[str, Any]
) -> None:
    theirs = learned(kind(learner(), **KEPT, **own))[-1]
    ours = learned(Metaplastic(learner(), **KEPT, **options))[-1]
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_network_is_judged_by_the_mean_of_its_past() -> None:
    method = Metaplastic(learner(), **KEPT, rule="none", average=0.9)
    past = learned(method)
    weights = torch.tensor([0.9**age for age in reversed(range(len(past)))])
    weights /= weights.sum()
    x = torch.randn(5, 4)
    judged = learner()
    with torch.no_grad():
        for number, parameter in enumerate(judged.model.parameters()):
            values = torch.stack([step[number] for step in past])
            parameter.copy_((weights.view(-1, *[1] * parameter.dim()) * values).sum(0))
    torch.testing.assert_close(method.learner.evaluate(x), judged.evaluate(x))


def test_where_the_stream_opposes_replay_a_closed_gate_lets_replay_alone_through() -> None:
    method = Metaplastic(learner(), **KEPT, gated="opposed", ambient=0.0)
    learned(method, 3)
    shut = [torch.zeros_like(value) for value in method.importance]
    method._gate = lambda parameters: shut  # type: ignore[method-assign]
    batch = Batch(torch.randn(6, 4), torch.randint(3, (6,)))
    twin = copy.deepcopy(method)
    stream, replay, _ = twin._losses(batch)
    assert replay is not None
    theirs = torch.autograd.grad(replay, twin.learner.parameters(), retain_graph=True)
    ours = torch.autograd.grad(stream, twin.learner.parameters())
    method.learn(batch)
    for parameter, a, b in zip(method.learner.parameters(), ours, theirs, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, b + torch.where(a * b < 0, 0.0, a))
    assert any(bool((a * b < 0).any()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS), ids=lambda path: "/".join(path.parts[-2:]))
def test_rows_of_its_experiments_can_be_made(path: Path) -> None:
    for row, options in read(str(path))["methods"].items():
        kinds = {"metaplastic": Metaplastic, "kronecker": Kronecker}
        if kind := kinds.get(options.get("method")):
            given = {key: value for key, value in options.items() if key != "method"}
            kind(learner(), **checked(given, signature(kind), row))


def factored(steps: int, **options: Any) -> tuple[Kronecker, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )
    method = Kronecker(Learner(model, lambda x, generator: x), lr=0.1, buffer=0, **options)
    batches = [Batch(torch.randn(5, 2, 3, 3), torch.randint(3, (5,))) for _ in range(steps + 1)]
    for batch in batches[:-1]:
        method.step(batch)
    return method, batches[-1]


def alike_beyond(moment: Tensor, rank: int) -> Tensor:
    """Return a matrix with its steepest directions, and the mean of the others for each of them."""
    lengths, ways = torch.linalg.eigh(moment.double())
    lengths[:-rank] = lengths[:-rank].mean()
    return ways @ torch.diag(lengths) @ ways.T


@pytest.mark.parametrize(
    "options",
    [{}, {"directions": "inputs"}, {"inputs": "channels"}, {"rank": 4}],
    ids=["both", "inputs", "channels", "rank"],
)
def test_a_factored_gate_is_the_mask_of_the_whole_matrix(options):
    method, batch = factored(4, **options, retention=0.5, refresh=1, consolidation=0.5)
    model = method.learner.model
    method.optimizer.zero_grad()
    method.loss(batch).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for _ in range(300 if "rank" in options else 1):  # steepest directions come by iterations
        method._turn()
    method.adjust()

    whole = {name: torch.diag(f.flatten()).double() for name, f in method.others.items()}
    for name, (outer, inner) in method.factors.items():
        if "directions" in options:
            outer = outer * torch.eye(len(gradients[f"{name}.weight"]))
        if "rank" in options:
            inner = alike_beyond(inner, 4)
        whole[f"{name}.weight"] = torch.kron(outer.double(), inner.double())
        if "inputs" in options and name == "0":  # each of the kernel's four places alike
            whole[f"{name}.weight"] = torch.kron(whole[f"{name}.weight"], torch.eye(4).double())
    mean = sum(f.trace() for f in whole.values()) / sum(len(f) for f in whole.values())
    assert set(whole) == set(gradients)
    for name, parameter in model.named_parameters():
        lengths, ways = torch.linalg.eigh(whole[name])
        mask = 1 - torch.tanh(method.steepness * lengths.clamp_min(0) / mean) + method.ambient
        wanted = ways @ (mask * (ways.T @ gradients[name].flatten().double()))
        assert mask.min() < 0.9 or "bias" in name
        torch.testing.assert_close(parameter.grad.flatten().double(), wanted, rtol=1e-4, atol=1e-7)


def test_factors_are_second_moments_of_inputs_and_of_sampled_gradients():
    method, batch = factored(0)
    model = method.learner.model
    twin = copy.deepcopy(model)
    state = method.labels.get_state()
    method.loss(batch)
    method.labels.set_state(state)
    logits = twin(batch.x)
    drawn = sample_labels(logits, method.labels)
    outer, inner = torch.zeros(3, 3), torch.zeros(8, 8)
    for x, label in zip(batch.x, drawn, strict=True):  # a sample, a place, one after the other
        out = twin[0](x[None]).detach().requires_grad_()
        (delta,) = torch.autograd.grad(-twin[1:](out).log_softmax(1)[0, label], out)
        padded = nn.functional.pad(x, (1, 1, 1, 1))
        for i in range(2):
            for j in range(2):
                patch = padded[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten()
                outer += torch.outer(delta[0, :, i, j], delta[0, :, i, j]) / 5
                inner += torch.outer(patch, patch) / 20
    torch.testing.assert_close(method.factors["0"], [outer, inner])


def test_a_factored_gate_goes_on_from_its_state():
    method, batch = factored(3, average=0.9)
    other, _ = factored(0, average=0.9)
    other.load_state_dict(copy.deepcopy(method.state_dict()))
    for each in (method, other):
        each.step(batch)
    torch.testing.assert_close(
        other.learner.state_dict(), method.learner.state_dict(), rtol=0, atol=0
    )


def test_a_factored_gate_can_be_captured():
    options: dict[str, Any] = {"directions": "inputs", "rank": 4, "every": 3, "early": 5}
    (one, _), (other, _) = (factored(0, refresh=4, **options) for _ in range(2))
    torch.manual_seed(1)
    batches = [Batch(torch.randn(5, 2, 3, 3), torch.randint(3, (5,))) for _ in range(40)]
    captured = CapturedMethod(other, graphs := Rerun(other))
    for batch in batches:
        one.step(batch)
        captured.learn(batch)
        other.after_step()
    assert not captured.failure
    assert graphs.captured == 2  # with an observation, and without
    assert_identical(one.state_dict(), other.state_dict())


# Averages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classes", "domains"])
def test_averages_of_one_run_are_compared(kind: str) -> None:
    found = average.run("er", kind, 5, 1, seed=0)
    assert {*found} == {"none", *average.AVERAGES}
    assert found["0.999"][0] < found["auto"][0] - 10, "which lags behind five short tasks"


def test_domains_have_every_label_in_every_task() -> None:
    tasks = average.domains(0)
    for task in range(5):
        assert tasks.train.labels[tasks.train.task == task].unique().tolist() == [*range(10)]


# Machines that are taken back -----------------------------------------------------------------

WITHIN = ROOT / "research" / "protection" / "within.sh"


def within(
    seconds: int,
    packed: Path,
    runs: Path,
    command: str,
    changes: dict[str, str] | None = None,
    what: tuple[str, ...] = ("name",),
) -> subprocess.CompletedProcess[str]:
    """Run the script with a command in place of Python."""
    python = runs.parent / "python"
    python.write_text(f"#!/bin/bash\n{command}\n")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", WITHIN, str(seconds), packed, runs, *what],
        env={**os.environ, **(changes or {}), "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("sleep 60", 124), ("false", 1)])
@pytest.mark.parametrize("what", [("name",), ("run", "name"), ("tune", "name", "--workers", "2")])
def test_what_is_there_is_packed_however_runs_end(
    tmp_path: Path, what: tuple[str, ...], command: str, code: int
) -> None:
    """Of runs, and of a search that has not ended."""
    packed, runs = tmp_path / "new" / "a-1.tgz", tmp_path / "runs"
    wrote = f'echo "$@" > {runs}/words; echo 1 > {runs}/trials.csv; {command}'
    done = within(1, packed, runs, wrote, what=what)
    assert done.returncode == code
    with tarfile.open(packed) as file:
        assert "./trials.csv" in file.getnames()
    called = ["run", *what] if what == ("name",) else [*what]
    assert (runs / "words").read_text().split() == [
        *("-m", "syngap", *called, "--out", str(runs), "--resume")
    ]


@pytest.mark.slow
def test_a_search_that_was_packed_there_goes_on_elsewhere(tmp_path: Path) -> None:
    written(tmp_path, f"search={SEARCH}", "search.trials=30", "stream.epochs=3")
    packed, runs = tmp_path / "a.tgz", tmp_path / "runs"
    stopped = f"""
        {shlex.quote(sys.executable)} "$@" & running=$!
        until [ "$(wc -l < {runs}/trials.csv)" -ge 4 ]; do sleep 0.1; done 2> /dev/null
        kill $running; wait
    """
    what = ("tune", str(tmp_path / "tiny.yaml"), "--methods", "er")
    within(120, packed, runs, stopped, what=what)
    with tarfile.open(packed) as file:
        file.extractall(tmp_path / "elsewhere", filter="data")
    shutil.rmtree(runs)
    before = read_record(tmp_path / "elsewhere")
    assert before is not None
    assert before.trials
    assert "chosen" not in before.entries
    tuned = bench.tune(
        tmp_path / "tiny.yaml", methods=["er"], out=tmp_path / "elsewhere", workers=2
    )
    now = read_record(tuned.experiment.parent)
    assert now is not None
    assert "chosen" in now.entries
    assert now.continues(before)


@pytest.mark.parametrize("name", ["a,b.tgz", "a b.tgz", "a%.tgz"])
def test_a_name_that_a_machine_may_refuse_is_refused_before_runs(tmp_path: Path, name: str) -> None:
    done = within(1, tmp_path / name, tmp_path / "runs", "true")
    assert done.returncode == 2
    assert "letters, digits" in done.stderr


def test_runs_are_not_packed_into_their_own_folder(tmp_path: Path) -> None:
    done = within(1, tmp_path / "runs" / "new" / "a.tgz", tmp_path / "runs", "true")
    assert done.returncode == 2
    assert "choose another folder" in done.stderr


def test_a_file_that_grows_while_it_is_packed_does_not_stop_packing(tmp_path: Path) -> None:
    packed, runs = tmp_path / "a.tgz", tmp_path / "runs"
    # tar says so by an exit code of 1, here of a tar that always does.
    tar = tmp_path / "tar"
    tar.write_text('#!/bin/bash\n/bin/tar "$@"; exit 1\n')
    tar.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    within(1, packed, runs, f"echo 1 > {runs}/metrics.jsonl", path)
    with tarfile.open(packed) as file:
        assert "./metrics.jsonl" in file.getnames()


# Data travel in parts.


def test_parts_that_arrive_one_by_one_are_unpacked_with_the_last(tmp_path: Path) -> None:
    data, sent, there = (tmp_path / name for name in ("data", "parts", "there"))
    (data / "texts").mkdir(parents=True)
    content = os.urandom(1000)
    (data / "texts" / "a.txt").write_bytes(content)
    (data / "model").write_bytes(b"weights")
    folders = parts.pack(sent, data, ["texts", "model"], largest=600)
    assert len(folders) >= 2
    assert all(sum(file.stat().st_size for file in one.iterdir()) <= 600 for one in folders)
    for number, folder in enumerate(folders):
        assert not (there / "model").exists()
        arrived = tmp_path / f"call{number}" / "parts"
        arrived.mkdir(parents=True)
        folder.rename(arrived / folder.name)
        said = parts.load(arrived, there)
    assert said == "parts: complete"
    assert (there / "texts" / "a.txt").read_bytes() == content
    assert (there / "model").read_bytes() == b"weights"


def test_parts_of_different_archives_are_not_joined(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(os.urandom(1000))
        parts.pack(tmp_path / name[0] / "parts", tmp_path, [name], largest=600)
    parts.load(tmp_path / "f" / "parts", tmp_path / "there")
    with pytest.raises(SystemExit, match="two archives"):
        parts.load(tmp_path / "s" / "parts", tmp_path / "there")


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(os.urandom(1000))
    (folder,) = parts.pack(tmp_path / "parts", tmp_path, ["model"])
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="damaged"):
        parts.load(tmp_path / "parts", tmp_path / "there")
