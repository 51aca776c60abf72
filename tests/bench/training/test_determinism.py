"""The same bits on a CPU for every method, wherever a run is done; and what `deterministic` sets.

What it gives on a GPU is in test_cuda.py, interrupted runs are in test_resume_after_kill.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import CASES, CLASSES, beginning, made, pictures, weights
from notebook import Interrupted, Notebook
from tiny import job, results, tiny, write_arrays
from torch import nn

from syngap.bench import methods
from syngap.bench.config.experiment import Experiment
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.compiler import Compiler, compiler_errors_refused
from syngap.bench.runner.local import Event, run_here, run_local
from syngap.bench.runner.plan import make_plan
from syngap.bench.runner.run import Job
from syngap.bench.store.environment import arithmetic, require_compiler
from syngap.bench.streams import Stream
from syngap.bench.training import train

ROWS = tuple(methods.registry.names())
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
VECTORS = (
    "stream={name: npz, path: data.npz, tasks: 2, batch: 20}",
    "training={device: cpu, evaluate_every: 3}",
    *(f"methods.{row}={{}}" for row in ROWS),
)


@pytest.fixture(autouse=True)
def vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of which a worker need not import more than torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CUBLAS, raising=False)
    write_arrays(tmp_path / "data.npz")


def jobs(out: Path, *settings: str) -> list[Job]:
    """A run of every method."""
    return make_plan(Experiment.from_mapping(tiny(*VECTORS, *settings)), out).jobs


def found(runs: list[Job]) -> dict[str, dict[str, bytes]]:
    return {run.name: results(run.folder) for run in runs}


@pytest.mark.slow
def test_every_method_ends_with_the_same_bytes_in_other_processes_and_another_order(
    tmp_path: Path,
) -> None:
    here, there = jobs(tmp_path / "here"), jobs(tmp_path / "there")
    assert len(here) == len(ROWS)
    for run in here:
        run_here(run)
    events: list[Event] = []
    run_local(list(reversed(there)), 1, events.append)
    assert [event.message for event in events if event.kind == "failed"] == []
    assert found(there) == found(here)


def test_on_a_cpu_deterministic_changes_nothing(tmp_path: Path) -> None:
    plain, told = jobs(tmp_path / "plain"), jobs(tmp_path / "told", "training.deterministic=true")
    for run in (*plain, *told):
        run_here(run)
    assert found(told) == found(plain)


# What it sets -------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    """All of this process that decides which kernels are taken."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cublas": os.environ.get(CUBLAS),
    }


ASKED = {"deterministic": True, "only warns": False, "benchmark": False, "cublas": ":4096:8"}


@pytest.fixture
def otherwise(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A process whose owner wants something else."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    return settings()


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_holds_during_a_run_and_no_longer(
    deterministic: bool,
    otherwise: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
    during: list[dict[str, Any]] = []
    asked = f"training.deterministic={str(deterministic).lower()}"
    run_here(job(tmp_path / "er-0", *VECTORS, asked), lambda *_: during.append(settings()))
    assert during
    assert all(each == (ASKED if deterministic else otherwise) for each in during)
    assert settings() == otherwise


def test_it_ends_with_a_run_that_fails(
    otherwise: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
    asked = ("training.deterministic=true", "training.threads=2")
    before = torch.get_num_threads()

    def fail(step: int, accuracy: float | None) -> None:
        assert (settings(), torch.get_num_threads()) == (ASKED, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(job(tmp_path / "er-0", *VECTORS, *asked), fail)
    assert (settings(), torch.get_num_threads()) == (otherwise, before)


def test_what_the_owner_of_the_process_set_for_cublas_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with arithmetic(1, deterministic=True):
        assert settings()["cublas"] == ":16:8"
    assert settings()["cublas"] == ":16:8"


def test_a_process_that_only_warns_goes_on_warning() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with arithmetic(1, deterministic=True):
            assert settings() == ASKED
        assert settings()["only warns"]
    finally:
        torch.use_deterministic_algorithms(False)


# Channels last ------------------------------------------------------------------------------------


def starter(case: str, stream: Stream, **options: Any) -> Callable[[], Method]:
    """What begins a method with a network in which images have more than one channel.

    Tanh in place of ReLU: an input near zero on the other side of a kink is not a rounding error.
    """

    def begin() -> Method:
        torch.manual_seed(7)
        network = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
        )
        return made(case, Learner(network, stream.transform, **options))

    return begin


@pytest.mark.parametrize("case", CASES)
def test_channels_last_learns_the_same_and_repeats_bit_for_bit_also_resumed(case: str) -> None:
    stream = pictures().present(starter(case, pictures())().sees)
    plain = train(stream, starter(case, stream), Notebook())
    begin = starter(case, stream, channels_last=True)
    assert begin().learner.parameters()[3].stride() == (36, 1, 12, 4)
    whole, again = train(stream, begin, Notebook()), train(stream, begin, Notebook())
    journal = Notebook(keep_every=1, fails_at=9)
    with pytest.raises(Interrupted):
        train(stream, begin, journal)
    resumed = train(stream, begin, replace(journal, fails_at=-1))
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(plain)[name], rtol=1e-3, atol=1e-4, msg=name)
        assert torch.equal(value, weights(again)[name]), name
        assert torch.equal(value, weights(resumed)[name]), name


# Compiled -----------------------------------------------------------------------------------------

Backend = Callable[[Any, Any], Callable[..., Any]]
TRACED = (
    *("er", "er_ace-teacher", "derpp-teacher", "syngap", "syngap-average", "syngap-teacher"),
    *("syngap-directions", "syngap-adam", "mas", "agem-teacher", "cls_er", "joint-retrained"),
)


def compile_by(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[Any]:
    """Replace inductor, which needs a C++ compiler; return the graphs that are compiled."""
    graphs: list[Any] = []

    def noted(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(Compiler, "backend", staticmethod(noted))
    return graphs


def traced(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Forward and backward pass as inductor gets them, run by torch's own kernels."""
    from torch._dynamo.backends.debugging import aot_eager

    compiled: Callable[..., Any] = aot_eager(graph, inputs)
    return compiled


def unchanged(graph: Any, inputs: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


def marked(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Code whose results show that it ran."""

    def run(*values: Any) -> Any:
        return tuple(1.01 * output for output in graph(*values))

    return run


def same(one: Method, other: Method) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, importing its compiler
@pytest.mark.parametrize("case", TRACED)
def test_compiled_steps_learn_what_eager_ones_do(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = compile_by(monkeypatch, traced)
    stream = pictures().present(starter(case, pictures())().sees)
    eager = train(stream, starter(case, stream), Notebook())
    assert not graphs
    compiled = train(stream, starter(case, stream, compiled=True), Notebook())
    assert graphs
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # inductor's own differ from version to version
def test_what_inductor_compiles_learns_the_same() -> None:
    stream = pictures()
    eager = train(stream, starter("syngap-teacher", stream), Notebook())
    compiled = train(stream, starter("syngap-teacher", stream, compiled=True), Notebook())
    assert compiled.learner.compiling
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-3, atol=1e-4)


def test_compiling_leaves_no_trace_in_random_numbers_and_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = compile_by(monkeypatch, unchanged)
    stream = pictures()
    eager = train(stream, beginning("er", stream), Notebook())
    compiled = train(stream, beginning("er", stream, compiled=True), Notebook())
    assert graphs
    assert same(compiled, eager)


@pytest.mark.parametrize("case", ["er", "derpp", "syngap-teacher", "cls_er"])
def test_a_compiled_run_ends_with_the_same_bits_wherever_it_is_interrupted(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(monkeypatch, marked)
    stream = pictures()
    begin = starter(case, stream, compiled=True)
    whole = train(stream, begin, Notebook())
    assert not same(whole, train(stream, starter(case, stream), Notebook()))
    for fails_at in (4, 6, 8, 10):
        journal = Notebook(keep_every=1, fails_at=fails_at)
        with pytest.raises(Interrupted):
            train(stream, begin, journal)
        resumed = train(stream, begin, replace(journal, fails_at=-1))
        assert same(resumed, whole), fails_at


def test_a_shape_is_compiled_once_from_its_third_pass_on_in_every_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = compile_by(monkeypatch, unchanged)
    for number in range(1, 12):  # torch compiles what learners share at most eight times
        learner = starter("er", pictures(), compiled=True)().learner
        for size in (4, 3, 4, 3, 2, 4, 4, 4):
            learner.predict(torch.zeros(size, 1, 8, 8))
            learner.evaluate(torch.zeros(5, 1, 8, 8))
        assert len(graphs) == number


def test_a_compiled_network_keeps_its_names_and_can_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = compile_by(monkeypatch, unchanged)
    stream = pictures()
    method = train(stream, starter("er-teacher", stream, compiled=True), Notebook())
    assert len(graphs) == 2  # of the network, and of its average, a copy that teaches
    plain = starter("er-teacher", stream)().learner.model
    assert list(method.learner.model.state_dict()) == list(plain.state_dict())


def test_a_network_with_hooks_is_not_compiled_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = compile_by(monkeypatch, marked)
    stream = pictures()
    with pytest.warns(UserWarning, match="not compiled: .* estimator: exact") as said:
        method = train(stream, starter("syngap-exact", stream, compiled=True), Notebook())
    assert len(said) == 1
    assert not graphs
    assert same(method, train(stream, starter("syngap-exact", stream), Notebook()))


def test_what_cannot_be_compiled_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler\nfound")

    compile_by(monkeypatch, fail)
    stream = pictures()
    with pytest.raises(UserError, match=r"training\.compiled: .*no compiler found.*leave compiled"):
        train(stream, starter("er", stream, compiled=True), Notebook())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, importing its compiler
@pytest.mark.parametrize("kind", ["CppCompileError", "RecompileError"])
def test_what_cannot_be_compiled_later_is_refused_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the backward pass of a loss, or of another precision."""
    from torch._dynamo.exc import RecompileError
    from torch._inductor.exc import CppCompileError

    error: RuntimeError = RecompileError("fatal error: no room")
    if kind == "CppCompileError":
        error = CppCompileError(["g++", *("-D" * 200)], "fatal error: no room")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("syngap.bench.runner.run.train", fail)
    said = r"training\.compiled: .*\(.{0,40}fatal error: no room\); leave compiled false"
    with pytest.raises(UserError, match=said):
        run_here(job(tmp_path / "compiled", "training.compiled=true"))
    with pytest.raises(type(error)):  # whose compiler that is, syngap does not know
        run_here(job(tmp_path / "plain"))


def test_other_errors_of_a_compiled_run_stay_what_they_are() -> None:
    for error in (RuntimeError("shapes"), torch.OutOfMemoryError("full"), ValueError("no")):
        with pytest.raises(type(error)), compiler_errors_refused():
            raise error


def test_without_a_compiler_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    experiment = Experiment.from_mapping(tiny("training.compiled=true"))
    with pytest.raises(UserError, match=r"training\.compiled: .*no-such-compiler.*not here"):
        make_plan(experiment, tmp_path / "out")
    assert make_plan(experiment, tmp_path / "out", device="cpu").jobs, (
        "another machine's is not known"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Triton brings a compiler there")
@pytest.mark.parametrize(
    ("there", "chosen", "refusal"),
    [
        ({"triton", "gcc"}, None, None),
        ({"triton", "clang"}, None, None),
        ({"triton", "mine"}, "mine", None),
        ({"triton"}, None, r"a C compiler \(gcc or clang\), which is not here"),
        ({"triton", "gcc", "g++"}, "mine", r"a C compiler \(mine\), which is not here"),
        ({"gcc"}, None, "the package triton, which is not here"),
    ],
)
def test_a_gpu_needs_triton_and_a_c_compiler(
    there: set[str], chosen: str | None, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which Triton compiles what starts a kernel."""
    for find in ("shutil.which", "find_spec"):
        there_or_none = {name: name for name in there}.get
        monkeypatch.setattr(f"syngap.bench.store.environment.{find}", there_or_none)
    monkeypatch.delenv("CC", raising=False)
    if chosen:
        monkeypatch.setenv("CC", chosen)
    if refusal is None:
        require_compiler(torch.device("cuda"))
        return
    with pytest.raises(UserError, match=rf"training\.compiled: .*{refusal}"):
        require_compiler(torch.device("cuda"))


def test_seconds_of_a_run_leave_out_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(graph: Any, inputs: Any) -> Callable[..., Any]:
        time.sleep(2.0)
        return unchanged(graph, inputs)

    graphs = compile_by(monkeypatch, slow)
    stream, journal = pictures(), Notebook()
    method = train(stream, starter("er", stream, compiled=True), journal)
    state = journal.load()
    assert graphs
    assert method.learner.compiling > 2.0
    assert state is not None
    assert state["seconds"] < 2.0


def test_the_option_reaches_a_run_and_is_off_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(monkeypatch, marked)
    found = []
    for name in ("", "training.compiled=false", "training.compiled=true"):
        folder = tmp_path / (name or "default") / "er-0"
        run_here(job(folder, *VECTORS, *([name] if name else [])))
        found.append(results(folder)["checkpoint/weights.safetensors"])
    assert found[0] == found[1] != found[2]
