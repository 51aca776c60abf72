"""A fine-tuning experiment from YAML to table: killed, resumed, packed, reported, repeated."""

from __future__ import annotations

import copy
import gc
import html
import json
import os
import re
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from finetuned import EXPERIMENT, encoder_setting, point, setting
from runfolders import write_experiment
from tiny import called
from torch import Tensor, nn

from syngap.bench import api
from syngap.bench.config.component import Component
from syngap.bench.config.experiment import shipped
from syngap.bench.config.finetuning import FinetuningExperiment, FinetuningRun, parse_experiment
from syngap.bench.doctor import findings
from syngap.bench.errors import UserError
from syngap.bench.finetuning import language_setting, loop, methods, models
from syngap.bench.finetuning.frontier import LEVELS
from syngap.bench.finetuning.loop import interpolate, train
from syngap.bench.finetuning.methods import Method
from syngap.bench.finetuning.point import Point
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.finetuning.texts import Question
from syngap.bench.reporting.finetuning.columns import forgetting_of
from syngap.bench.reporting.finetuning.comparison import compare_methods
from syngap.bench.reporting.finetuning.comparison_page import comparison_page
from syngap.bench.reporting.finetuning.comparison_table import (
    AT_LEVELS,
    answers,
    before_and_after,
    headline,
    markdown,
    notes,
    relative_to_adamw,
    short_notes,
    table,
)
from syngap.bench.reporting.finetuning.frontiers import MOST, drawn_outcomes
from syngap.bench.reporting.finetuning.repeated import repeated
from syngap.bench.reporting.queries import run_query
from syngap.bench.reporting.results import Results
from syngap.bench.runner import finetuning_run
from syngap.bench.runner.finetuning_run import FinetuningJob
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import make_plan
from syngap.bench.runner.recorded import repeat_finetuning
from syngap.bench.runs import Runs
from syngap.bench.store import shared
from syngap.bench.store.folder_reader import read_run, read_runs
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.store.keep import keep
from syngap.bench.store.outcome import Environment, RecordedConfig, Run, Status
from syngap.bench.training.checkpoint import pack, unpack
from syngap.optim.checks import is_compiled


@pytest.fixture(autouse=True, scope="module")
def unsynced() -> Iterator[None]:
    """A loss of power is not what is tried here, and syncs take most of the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


def experiment(**changes: Any) -> FinetuningExperiment:
    found = parse_experiment({**copy.deepcopy(EXPERIMENT), **changes}).select(None, None)
    assert isinstance(found, FinetuningExperiment)
    return found


def run_all(out: Path, of: FinetuningExperiment) -> None:
    plan = make_plan(of, out, if_there="resume")
    with plan.begin():
        for job in plan.jobs:
            run_here(job)


def losses(run: Run) -> list[tuple[Any, ...]]:
    """All of a run's points but for the time that it took."""
    return [(p.step, p.share, p.new, dict(p.old)) for p in run.points]


# torch.compile hides this one while it looks at tensors, which does not help where it is an error.
compiles = pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")


class Compiler:
    """In place of torch.compile's own, which takes a minute: runs the operations one by one."""

    def __init__(self) -> None:
        self.graphs = 0
        self.on_graph: Callable[[], None] = lambda: None

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.on_graph()
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found, compile_module = Compiler(), nn.Module.compile

    def compile_cheaply(module: nn.Module, **options: Any) -> None:
        compile_module(module, **options, backend=found)

    monkeypatch.setattr(nn.Module, "compile", compile_cheaply)
    # Not by the environment: torch looks once at which compiler that names, for the whole process.
    monkeypatch.setattr("syngap.bench.runner.plan.require_compiler", lambda device: None)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    run_all(out, experiment())
    return out


# Runs ---------------------------------------------------------------------------------------------


def test_a_run_has_the_start_and_each_evaluation_with_each_share(ran: Path) -> None:
    run = read_run(ran / "kl.lr0.01-0")
    assert run.done
    assert [(p.step, p.share) for p in run.points] == [
        *((0, 1.0), (2, 1.0), (2, 0.5), (4, 1.0), (4, 0.5)),
    ]
    assert list(run.points[0].old) == ["manual", "code"]
    assert all(p.setup <= p.seconds for p in run.points)
    assert run.status.seconds == pytest.approx(run.points[-1].seconds, abs=1e-3)


def test_all_trials_of_a_seed_have_the_same_start_and_it_is_made_once(ran: Path) -> None:
    starts = {str((run.points[0].new, dict(run.points[0].old))) for run in read_runs(ran)}
    assert len(starts) == 1
    names = sorted(path.name.partition("-")[0] for path in (ran / "shared").iterdir())
    assert names == ["samples", "start"]


def test_what_is_shared_is_made_once_for_the_same_values(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        made.append(len(made))
        return {"weight": torch.full((2,), float(len(made)))}

    def weight(**values: int) -> float:
        return float(shared.share_in(tmp_path, {**values})("start", make).tensors["weight"][0])

    assert [weight(seed=0), weight(seed=0), weight(seed=1), weight(seed=0)] == [1, 1, 2, 1]
    assert made == [0, 1]
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        weight(seed=0)


def test_what_no_seed_changes_is_shared_by_all_seeds(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        made.append(len(made))
        return {"tokens": torch.tensor(made)}

    def tokens(model: str, seed: int) -> int:
        share = shared.share_in(tmp_path, {"model": model, "seed": seed}, {"model": model})
        return len(share("tokens", make, any_seed=True).tensors["tokens"])

    assert [tokens("a", 0), tokens("a", 1), tokens("b", 1), tokens("a", 2)] == [1, 1, 2, 1]


def test_a_shared_folder_is_filled_once_and_again_where_that_was_cut_short(tmp_path: Path) -> None:
    share = shared.share_folder_in(tmp_path, {"model": "a"})

    def killed(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share("model", killed)
    found = share("model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in found.iterdir()] == ["whole"]
    assert share("model", killed) == found
    other = shared.share_folder_in(tmp_path, {"model": "b"})
    with pytest.raises(KeyboardInterrupt):
        other("model", killed)


MODEL_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.safetensors"]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_nothing_is_shared_by_models_of_other_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's count: texts have other tokens, and so have own samples."""
    data, made = tmp_path / "data", list[str]()
    place = data / "llama"
    place.mkdir(parents=True)
    for file in MODEL_FILES:
        (place / file).write_text("one")

    def fill(folder: Path) -> None:
        made.append("folder")

    def tensors() -> dict[str, Tensor]:
        made.append("tensors")
        return {"tokens": torch.zeros(1)}

    def model(making: Any, **options: Any) -> Any:
        assert making.share_folder is not None
        making.share_folder("model", fill)
        making.share("tokens", tensors, any_seed=True)
        making.share("samples", tensors)
        return object()

    config = make_plan(experiment(), tmp_path / "out").jobs[0].config
    monkeypatch.setattr(models.registry, "get", lambda _: model)
    assert isinstance(config, FinetuningRun)
    config = replace(config, model=Component("causal_lm", {"folder": "llama", "gguf": None}))
    job = FinetuningJob(tmp_path / "out" / "adamw-0", config, data)

    def times() -> int:
        """How often things are made."""
        made.clear()
        finetuning_run._loaded.clear()  # as in a new process
        finetuning_run._load(job, finetuning_run._source(config, data))
        return len(made)

    assert [times(), times()] == [3, 0]
    (place / ".gitattributes").write_text("")  # no part of a model
    os.utime(place / name)
    assert times() == 0
    (place / name).write_text("two")
    assert [times(), times()] == [3, 0]
    (place / name).unlink()
    assert times() == 3


def test_a_run_does_not_go_on_with_a_model_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, files = experiment(methods={"adamw": {}}), {"llama/tokenizer.json": "a"}
    monkeypatch.setattr(finetuning_run, "digests", lambda *_: dict(files))

    def killed(self: FolderJournal, step: int) -> bool:
        if step > 2:
            raise Killed
        return True

    with monkeypatch.context() as patched:
        patched.setattr(FolderJournal, "advance", killed)
        with pytest.raises(Killed):
            run_all(tmp_path, of)
    files["llama/tokenizer.json"] = "b"
    plan = make_plan(of, tmp_path, if_there="resume")
    with plan.begin(), pytest.raises(UserError, match="the files of the model, are not those"):
        run_here(plan.jobs[0])
    files["llama/tokenizer.json"] = "a"
    run_all(tmp_path, of)
    assert read_run(tmp_path / "adamw-0").done


def test_runs_of_a_process_load_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    get = models.registry.get

    def counted(name: str) -> Any:
        loads.append(name)
        return get(name)

    plan = make_plan(experiment(), tmp_path / "out")
    monkeypatch.setattr(models.registry, "get", counted)
    with plan.begin():
        for job in plan.jobs:
            run_here(job)
    assert loads == ["byte"]


def test_own_samples_count_as_set_up_of_the_methods_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=ticks.__next__))
    run_all(tmp_path / "out", experiment())
    setups = {run.row: run.points[0].setup for run in read_runs(tmp_path / "out")}
    assert setups["kl.lr0.01"] > 1000 > setups["adamw.lr0.01"]


class Killed(BaseException):
    """What a kill looks like from within."""


@compiles
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "compiled"), [("adamw", False), ("adamw", True), ("protect", False)]
)
@pytest.mark.parametrize("survives", [1, 3])
def test_a_killed_run_resumes_to_the_same_bits(
    name: str, compiled: bool, survives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {**EXPERIMENT["training"], "compiled": compiled}
    of = experiment(methods={name: {}}, training=training)
    run_all(tmp_path / "whole", of)
    with monkeypatch.context() as patched:
        advance = FolderJournal.advance

        def killed(self: FolderJournal, step: int) -> bool:
            if step > survives:
                raise Killed
            return advance(self, step)

        patched.setattr(FolderJournal, "advance", killed)
        with pytest.raises(Killed):
            run_all(tmp_path / "killed", of)
    begun = read_run(tmp_path / "killed" / f"{name}-0")
    assert not begun.done
    assert begun.points
    steps: list[int] = []
    step = Method.step

    def counted(self: Method, batch: Batch, warmup: float = 1.0) -> None:
        steps.append(self.steps)
        step(self, batch, warmup)

    monkeypatch.setattr(Method, "step", counted)
    run_all(tmp_path / "killed", of)
    assert steps == [0, *range(survives, 4)]  # the first warms up
    resumed = read_run(tmp_path / "killed" / f"{name}-0")
    assert losses(resumed) == losses(read_run(tmp_path / "whole" / f"{name}-0"))


def test_rows_and_seeds_that_are_added_join_those_that_are_there(ran: Path, tmp_path: Path) -> None:
    more = experiment(methods={"adamw": {"lr": [0.003, 0.01]}, "sgd": {"lr": [0.1, 0.3]}})
    plan = make_plan(more, ran, if_there="resume")
    assert [job.config.row for job in plan.jobs] == ["sgd.lr0.1", "sgd.lr0.3"]
    assert list(plan.experiment.methods) == ["adamw", "kl", "sgd"]
    other = experiment(training={**EXPERIMENT["training"], "steps": 5})
    with pytest.raises(UserError, match=r"training\.steps was 4 there and is 5 now"):
        make_plan(other, ran, if_there="resume")


# Compiled runs ------------------------------------------------------------------------------------


class Notes:
    """A journal in memory; a kill comes after each step that is named, when its state is kept."""

    def __init__(self, kills: Collection[int] = ()) -> None:
        self.kills = set(kills)
        self.points: list[Point] = []
        self.state: bytes | None = None

    def load(self) -> dict[str, Any] | None:
        return None if self.state is None else unpack(self.state)

    def record_point(self, point: Point) -> None:
        self.points.append(point)

    def advance(self, step: int) -> bool:
        return True

    def save(self, state: dict[str, Any]) -> None:
        self.state = pack(state)
        if state["step"] in self.kills:
            self.kills.discard(state["step"])
            raise Killed


def tune(
    of: Setting, kind: Callable[[Setting], Method], notes: Notes, *, steps: int = 4, **options: Any
) -> float:
    options = {"compiled": True, "evaluations": steps, **options}
    return train(
        of, lambda: kind(of), notes, steps=steps, batch=4, warmup=2, shares=(1.0, 0.5), **options
    )


@compiles
@pytest.mark.parametrize("make", [setting, encoder_setting])
@pytest.mark.parametrize("name", ["adamw", "kl", "protect", "freeze"])
def test_a_compiled_run_ends_where_a_plain_one_does(
    make: Callable[[], Setting], name: str, compiler: Compiler
) -> None:
    plain, compiled = Notes(), Notes()
    tune(make(), methods.registry.get(name), plain, compiled=False)
    assert not compiler.graphs
    tune(make(), methods.registry.get(name), compiled)
    assert compiler.graphs
    for one, other in zip(compiled.points, plain.points, strict=True):
        assert one.new == pytest.approx(other.new, rel=1e-5)
        for kind, loss in other.old.items():
            assert one.old[kind] == pytest.approx(loss, rel=1e-5, abs=1e-6)


@compiles
@pytest.mark.usefixtures("compiler")
def test_all_models_of_a_method_are_compiled_and_the_start_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = setting()
    predict = type(of).predict
    seen: dict[int, tuple[nn.Module, bool]] = {}

    def noted(self: Any, model: nn.Module, inputs: Tensor) -> Tensor:
        seen[id(model)] = model, any(map(is_compiled, model.modules()))
        return predict(self, model, inputs)

    monkeypatch.setattr(type(of), "predict", noted)
    monkeypatch.setattr(loop, "_warm_up", lambda *_: None)
    tune(of, methods.registry.get("kl"), Notes(), evaluations=1)
    assert seen.pop(id(of.start)) == (of.start, False)
    assert [compiled for _, compiled in seen.values()] == [True] * 3  # with the one evaluated


class Growing(Method):
    """Each step has another number of rows from some step on, so that blocks are compiled again."""

    first = 5

    def loss(self, batch: Batch) -> Tensor:
        (windows,) = batch
        more = max(0, self.steps + 2 - self.first)
        return super().loss((windows.repeat(1 + more, 1),))


@pytest.fixture
def slow_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second, and to compile takes 100."""
    now, step = [0.0], Method.step

    def timed(self: Method, *args: Any) -> None:
        step(self, *args)
        now[0] += 1.0

    def advance() -> None:
        now[0] += 100.0

    compiler.on_graph = advance
    monkeypatch.setattr(Method, "step", timed)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))


@compiles
@pytest.mark.parametrize("kills", [(), (1,), (2, 3), (5,)])
@pytest.mark.usefixtures("slow_compiler")
def test_to_compile_takes_no_seconds_whenever_it_happens(kills: tuple[int, ...]) -> None:
    of, notes = setting(), Notes(kills)
    for _ in kills:
        torch._dynamo.reset()  # as in another process
        with pytest.raises(Killed):
            tune(of, Growing, notes, steps=9)
    torch._dynamo.reset()
    seconds = tune(of, Growing, notes, steps=9)
    assert seconds == 9
    plain = 3 if 1 in kills else 2  # the first step that did not compile
    assert {p.step: p.seconds for p in notes.points if p.step >= plain} == {
        number: float(number) for number in range(plain, 10)
    }


@compiles
@pytest.mark.usefixtures("slow_compiler")
def test_where_all_steps_compile_they_count_as_long_as_they_took() -> None:
    assert tune(setting(), Method, Notes(), steps=1) == 101
    assert tune(setting(), Method, Notes(), steps=1) == 1  # it is compiled already


@compiles
def test_many_kinds_of_blocks_are_all_compiled_and_limits_are_as_before(compiler: Compiler) -> None:
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    kinds = 2 * limits[0]

    class Many(Growing):
        first = 1

    tune(setting(), Many, Notes(), steps=kinds, evaluations=1)
    assert compiler.graphs >= kinds
    assert limits == (
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.accumulated_recompile_limit,
    )


@compiles
@pytest.mark.usefixtures("compiler")
def test_a_model_that_was_evaluated_takes_no_memory_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, step, alive = setting(), Method.step, []
    evaluate, seen = type(of).evaluate, []

    def noted(self: Any, model: nn.Module) -> Any:
        if model is not of.start:
            seen.extend(map(weakref.ref, model.parameters()))
        return evaluate(self, model)

    def counted(self: Method, *args: Any) -> None:
        alive.append(sum(param() is not None for param in seen))
        step(self, *args)

    monkeypatch.setattr(type(of), "evaluate", noted)
    monkeypatch.setattr(Method, "step", counted)
    gc.disable()  # which may happen to free them in time
    try:
        tune(of, Method, Notes())
    finally:
        gc.enable()
    assert len(seen) == 8 * len(list(of.start.parameters()))
    assert alive == [0] * 5


def test_without_a_compiler_a_compiled_run_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = experiment(training={**EXPERIMENT["training"], "compiled": True})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UserError, match=r"training\.compiled: .*C\+\+ compiler \(no-such-compiler\)"
    ):
        make_plan(of, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    make_plan(experiment(), tmp_path / "out")


@compiles
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: Compiler, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler\nfound")

    compiler.on_graph = fail
    of = experiment(training={**EXPERIMENT["training"], "compiled": True}, methods={"adamw": {}})
    with pytest.raises(UserError, match=r"training\.compiled: .*no compiler found.*leave compiled"):
        run_all(tmp_path / "out", of)


def test_a_run_that_is_older_than_the_option_was_not_compiled() -> None:
    run = experiment().runs()[0]
    recorded = run.as_mapping()
    assert isinstance(recorded["training"], dict)
    del recorded["training"]["compiled"]
    assert run.complete(recorded) == run.as_mapping()


# Evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [1, 20_000, 1 << 40])
def test_a_mean_is_the_same_however_many_softmaxes_are_taken_at_a_time(
    logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = setting()
    monkeypatch.setattr(language_setting, "_SOFTMAX", logits)
    found = of.evaluate(of.start)
    for kind, halves in {**found.old, of._making.source.new: found.new}.items():
        for half, windows in zip(halves, of.tests[kind], strict=True):
            told = [float(of.loss(of.start, (window[None],)).detach()) for window in windows]
            assert half == pytest.approx(sum(told) / len(told), rel=1e-5)


class Alphabet(torch.nn.Module):
    """After each letter the likeliest is the next one of the alphabet, and after z a."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        following = torch.where(tokens == ord("z"), ord("a"), tokens + 1)
        return torch.nn.functional.one_hot(following, 300).float()


def test_a_question_is_answered_where_the_likeliest_tokens_are_the_answer() -> None:
    of = setting()
    texts = [("a", "bcd"), ("xy", "za"), ("a", "bd"), ("a", "c")]
    of.questions = of.encode_questions([Question(*text) for text in texts])
    assert of.exact_match(Alphabet()) == (1.0, 0.0)
    assert setting().exact_match(Alphabet()) is None


def test_a_skill_is_in_the_table(tmp_path: Path) -> None:
    texts = {"name": "skill", "letters": 2, "lines": 400}
    run_all(tmp_path / "out", experiment(texts=texts, methods={"adamw": {}}))
    found = read_run(tmp_path / "out" / "adamw-0")
    assert all(p.exact is not None and min(p.exact) >= 0 for p in found.points)
    assert "exact match" in api.load(tmp_path / "out").markdown()
    keep(tmp_path / "out", tmp_path / "kept")
    assert read_runs(tmp_path / "kept")[0].points == found.points


def test_interpolated_weights_lie_between_the_start_and_the_trained_ones() -> None:
    of = setting()
    start = dict(of.start.named_parameters())
    trained = {name: param.detach() + 1 for name, param in start.items()}
    for share in (0.0, 0.25, 1.0):
        model = copy.deepcopy(of.start)
        interpolate(model, of.start, trained, share)
        for name, param in model.named_parameters():
            told = (start[name] + share * (trained[name] - start[name])).detach()
            torch.testing.assert_close(param.detach(), told)


# Packed -------------------------------------------------------------------------------------------


def test_packed_runs_are_what_the_folders_were(ran: Path, tmp_path: Path) -> None:
    kept = keep(ran, tmp_path / "results")
    assert len(kept.runs) == 4
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        *("curves.jsonl.gz", "experiment.yaml", "runs.jsonl"),
    ]
    for packed, run in zip(read_runs(tmp_path / "results"), read_runs(ran), strict=True):
        assert packed.points == run.points
        assert packed.config.entries == run.config.entries
        assert packed.family == run.family
    assert keep(ran, tmp_path / "results").written == 0


@pytest.mark.parametrize(
    "change",
    [
        {"share": 1.5},
        {"step": -1},
        {"old": {}},
        {"new": [1.0]},
        {"new": ["x", 1.0]},
        {"seconds": 0.1, "setup": 0.2},
        {"memory": -1},
    ],
)
def test_a_point_that_no_run_can_have_is_refused(change: dict[str, Any]) -> None:
    right = json.loads(json.dumps(point(2.0, 1.0).as_mapping()))
    assert Point.from_mapping(right) == point(2.0, 1.0)
    with pytest.raises(ValueError, match=r".+"):
        Point.from_mapping({**right, **change})


def test_points_out_of_order_are_refused(ran: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kl.lr0.01-0"
    folder.mkdir()
    for file in (ran / "kl.lr0.01-0").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines, lines[1], ""]))
    with pytest.raises(UserError, match="after step 4"):
        read_run(folder)


# Reports ------------------------------------------------------------------------------------------


def made(
    family: str, seed: int, points: list[Point], *, lr: float = 0.1, state: str = "done"
) -> Run:
    config = {
        "row": f"{family}.lr{lr:g}",
        "family": family,
        "seed": seed,
        "texts": {"name": "files", "new": "german"},
        "method": {"name": family, "lr": lr},
    }
    start = point(3.0, 1.0, step=0, seconds=0.5)
    return Run(
        Path("runs") / f"{config['row']}-{seed}",
        RecordedConfig.from_mapping(config),
        Status({"state": state}),
        Environment(),
        [],
        points=[start, *points],
    )


def hand_made() -> Iterator[Run]:
    for seed, kept in ((0, 1.2), (1, 1.1)):
        yield made("adamw", seed, [point(2.0, 1.4)])
        slow = point(2.0, 1.04, share=0.85, seconds=2.2)
        yield made("gate", seed, [point(2.0, kept), point(2.0, 1.08, share=0.7), slow])


def test_the_table_has_ratios_as_trained_interpolated_and_at_equal_time() -> None:
    text = markdown(compare_methods(list(hand_made())))
    head, _, adamw, gate = text.splitlines()[:4]
    heads = [cell.strip() for cell in head.split("|")[1:-1]]
    cells = dict(zip(heads, (cell.strip() for cell in gate.split("|")[1:-1]), strict=True))
    assert adamw.split("|")[1].strip() == "AdamW"
    assert cells == {
        "method": "gate",
        "trials": "1",
        "seeds": "2",
        "best new loss ↓": "2.000 (2.000 to 2.000)",
        "gain / AdamW ↑": "1.00 (1.00 to 1.00)",
        "english, as trained ↓": "0.38 (0.25 to 0.50)",
        "english, interpolated ↓": "0.10 (0.10 to 0.10)",
        "english, equal time ↓": "0.20 (0.20 to 0.20)",
        "good rates": "0.1",
        "s": "2.2",
        "GiB": "–",
    }


def test_a_part_of_the_table_has_its_rows_columns_and_level() -> None:
    found = compare_methods(list(hand_made()))
    part = markdown(found, ["gate"], only=["s", "english.trained"], level=0.95)
    assert part.splitlines()[0] == "| method | s | english, as trained ↓ |"
    at_level = forgetting_of(found, "gate", "english", "trained", 0.95)
    assert part.splitlines()[2:4] == [f"| gate | 2.2 | {at_level} |", ""]
    assert "at 95 % of AdamW's best gain" in part
    assert "equal time" not in markdown(found, level=0.95).splitlines()[0], "it has no levels"
    for wrong in ("english.equal", "latin.trained", "S"):
        with pytest.raises(UserError, match="unknown"):
            markdown(found, only=[wrong])


def test_what_is_left_out_is_named_for_the_rows_that_are_shown() -> None:
    broken = [
        made("adamw", 0, [point(2.0, 1.4)]),
        made("gate", 0, [point(2.0, 1.1)]),
        made("gate", 1, [point(2.0, 1.1)]),
    ]
    found = replace(compare_methods(broken), missing={"gate": ["seed 1: 1 of 2 trials ended"]})
    assert "gate, seed 1: 1 of 2 trials ended" in markdown(found)
    assert "gate, seed 1: 1 of 2 trials ended" in markdown(found, ["gate"], only=["s"])
    assert "seed 1" not in markdown(found, ["adamw"], only=["s"])


def test_the_headline_names_the_method_that_forgets_least() -> None:
    assert headline(compare_methods(list(hand_made()))) == (
        "gate with interpolation forgets least, on average 0.10 of what AdamW forgets of english "
        "at 70, 80, 90 and 95 % of AdamW's best gain on german (2 seeds)."
    )


def test_the_headline_the_table_and_the_page_define_forgetting_at_the_same_levels() -> None:
    found = compare_methods(list(hand_made()))
    heads, lines = before_and_after(found)
    number = next(line for line in lines if line[0] == "gate")[heads.index("interpolated ↓")]
    assert f"on average {number} of what AdamW forgets" in headline(found)
    assert all(f"{100 * level:g}" in AT_LEVELS for level in LEVELS)
    for said in (headline(found), short_notes(found), " ".join(notes(found))):
        assert AT_LEVELS in said
    for shown in (str(table(found).caption), html.unescape(comparison_page(list(hand_made()), ""))):
        assert short_notes(found) in shown


def test_of_several_kinds_the_one_that_is_forgotten_most_counts() -> None:
    found = compare_methods(list(hand_made()))
    adamw, gate = found.outcomes
    more = {"english": [0.0, 0.0], "python": [0.2, 0.4]}
    both = replace(
        found,
        old=["english", "python"],
        outcomes=[
            replace(adamw, interpolated={kind: [1.0, 1.0] for kind in more}),
            replace(gate, interpolated=more),
        ],
    )
    assert headline(both).startswith(
        "gate with interpolation forgets least, on average 0.30 of what AdamW forgets of python at"
    )


def test_of_several_methods_that_forget_nothing_the_headline_names_each() -> None:
    found = compare_methods(list(hand_made()))
    adamw, gate = found.outcomes
    gate = replace(gate, interpolated={"english": [0.004, 0.0]})
    alone = replace(found, outcomes=[adamw, gate])
    assert headline(alone).startswith("gate with interpolation forgets nothing at 70, 80, 90")
    more = replace(gate, family="more", gains=[1.2, 1.1])
    both = replace(found, outcomes=[adamw, gate, more])
    assert headline(both) == (
        "gate and more with interpolation forget nothing at 70, 80, 90 and 95 % of AdamW's best "
        "gain on german; of these, more learns most (2 seeds)."
    )


def test_gain_time_and_memory_are_multiples_of_adamws() -> None:
    found = compare_methods(list(hand_made()))
    adamw, gate = found.outcomes
    outcomes = [replace(adamw, memory=2**30), replace(gate, memory=3 * 2**29, gains=[1.0, 1.5])]
    found = replace(found, outcomes=outcomes)
    said = [relative_to_adamw(found, "gate", what) for what in ("gain", "time", "memory")]
    assert said == ["1.25 (1.00 to 1.50)", "1.1", "1.5"]
    with pytest.raises(UserError, match="there are gain, time, memory"):
        relative_to_adamw(found, "gate", "speed")
    on_cpu = compare_methods(list(hand_made()))
    assert relative_to_adamw(on_cpu, "gate", "memory") == "–"


def test_right_answers_stand_beside_what_was_forgotten_for_them() -> None:
    """A row is where most answers are right, as trained; what has no answers has a dash."""
    right = [replace(point(2.0, 1.5), exact=(0.9, 0.9)), replace(point(2.2, 1.1), exact=(0.5, 0.5))]
    interpolated = replace(point(2.1, 1.0, share=0.7), exact=(1.0, 1.0))
    runs = [made("adamw", seed, [*right, interpolated]) for seed in (0, 1)]
    runs += [made("gate", seed, [point(2.0, 1.1)]) for seed in (0, 1)]
    found = compare_methods(runs)
    head, _, adamw, gate = answers(found, "english").splitlines()
    assert head == "|  | exact match ↑ | rise on english ↓ | s | GiB |"
    assert adamw.startswith("| AdamW | 0.90 (0.90 to 0.90) | 0.50 (0.50 to 0.50) |")
    assert gate.startswith("| gate | – (0 of 2) | – (0 of 2) |")
    with pytest.raises(UserError, match="there are english"):
        answers(found, "klingon")
    short, lines = before_and_after(found)
    assert short[2] == "exact match ↑"
    assert [line[2] for line in lines] == ["–", "0.90", "–"], "before, AdamW, gate"
    assert answers(found, "english", "adamw", "rise") == "0.50 (0.50 to 0.50)"
    with pytest.raises(UserError, match="there are exact, rise, s, GiB"):
        answers(found, "english", "adamw", "speed")


def test_the_short_table_begins_with_what_was_before() -> None:
    """Then each method's losses where it learned most, as trained, of one and the same point."""
    found = compare_methods(list(hand_made()))
    heads, lines = before_and_after(found)
    assert heads == [
        "method",
        "new: german ↓",
        "old: english ↓",
        "forgets ↓",
        "interpolated ↓",
        "s",
    ]
    start = found.tried["adamw"][0].start
    assert lines == [
        ["before", f"{start.new[0]:.3f}", f"{start.old['english'][0]:.3f}", "", "", ""],
        ["AdamW", "2.000", "1.400", "1.00", "1.00", "2.0"],
        ["gate", "2.000", "1.150", "0.38", "0.10", "2.2"],
    ]


def test_points_that_are_not_finite_and_trials_that_have_not_ended_are_left_out_and_named() -> None:
    broken = replace(point(1.0, float("nan")), step=300)  # its new loss would be the best
    runs = [
        made("adamw", 0, [point(2.0, 1.4)]),
        made("gate", 0, [point(2.0, 1.1), broken]),
        made("kl", 0, [point(2.0, 1.1)]),
        made("kl", 0, [point(2.0, 1.1)], lr=0.3, state="running"),
    ]
    text = markdown(compare_methods(runs))
    assert "nan" not in text
    assert "| gate | 1 | 1 | 2.000 |" in text
    assert "not finite are left out: gate 1" in text
    assert "kl, seed 0: 1 of 2 trials ended" in text
    assert "| kl |" not in text


def from_another_start(run: Run, **changes: Any) -> Run:
    """Return a run as of another version of the model or of the texts."""
    return replace(run, points=[replace(run.points[0], **changes), *run.points[1:]])


@pytest.mark.parametrize(
    "changes",
    [
        {"new": (3.1, 3.0)},
        {"old": {"english": (1.0, 0.99)}},
        {"old": {"latin": (1.0, 1.0)}},
    ],
)
def test_a_seed_that_began_from_another_start_is_not_compared(changes: dict[str, Any]) -> None:
    adamw, gate, adamw_1, gate_1 = hand_made()
    whole = compare_methods([adamw, gate])
    found = compare_methods([adamw, gate, adamw_1, from_another_start(gate_1, **changes)])
    assert [one.seeds for one in found.outcomes] == [[0, 1], [0]]
    assert found.outcomes[1] == whole.outcomes[1]
    said = "seed 1: other losses before the first step than adamw's"
    assert f"Not in these numbers: gate, {said}." in markdown(found)
    none = compare_methods([adamw, from_another_start(gate, **changes)])
    assert [one.family for one in none.outcomes] == ["adamw"]
    rounded = from_another_start(gate, new=(3.0001, 3.0))
    assert compare_methods([adamw, rounded]).missing == {}


def test_trials_of_a_seed_that_began_from_several_starts_are_not_compared() -> None:
    runs = [
        *hand_made(),
        from_another_start(made("gate", 0, [point(1.0, 1.0)], lr=0.2), new=(2.0, 2.0)),
        made("gate", 1, [point(2.0, 1.1)], lr=0.2),
    ]
    found = compare_methods(runs)
    assert found.outcomes[1].seeds == [1]
    assert found.missing == {"gate": ["seed 0: other losses before the first step in some trials"]}


def test_without_adamw_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(UserError, match="adamw"):
        compare_methods([made("gate", 0, [point(2.0, 1.1)])])


def drawn(seeds: dict[str, int]) -> list[str]:
    """Return what a figure has of rows, of each of which so many seeds ended."""
    runs = [
        made(row, seed, [point(2.0, 1.4)]) for row, count in seeds.items() for seed in range(count)
    ]
    return [outcome.family for outcome in drawn_outcomes(compare_methods(runs))]


def test_the_figure_has_adamw_protect_and_the_first_methods_with_all_seeds() -> None:
    many = {f"method{number}": 2 for number in range(9)}
    rows = {**many, "method1": 1, "adamw": 2, "protect": 2}
    first = [f"method{number}" for number in (0, 2, 3, 4, 5, 6)]
    assert drawn(rows) == [*first, "adamw", "protect"]
    assert len(drawn(rows)) == MOST
    assert drawn({"adamw": 3, "kl": 2, "ewc": 1}) == ["adamw", "kl"], "no row has AdamW's seeds yet"
    assert drawn({"adamw": 2}) == ["adamw"]


def test_the_page_names_the_rows_that_are_in_the_table_alone() -> None:
    extra = [made("kl", 0, [point(2.0, 1.2)])]
    assert "In the table alone: KL." in comparison_page([*hand_made(), *extra], "one")
    assert "In the table alone" not in comparison_page(list(hand_made()), "none")


def test_the_page_shows_the_table_the_figure_and_every_trial() -> None:
    page = comparison_page(list(hand_made()), "<tiny>")
    assert "<h1>&lt;tiny&gt;</h1>" in page
    assert "0.38 (0.25 to 0.50)" in page
    assert "data:image/svg+xml;base64," in page
    assert page.count("<tr><th scope='row'>gate.lr0.1</th>") == 2
    assert "{{" not in page


def test_the_page_of_a_stream_may_begin_with_a_comparison_of_fine_tuning(
    ran: Path, tmp_path: Path
) -> None:
    streams = Runs(write_experiment(tmp_path / "streams", every=20))
    plain = streams.report().read_text("utf-8")
    page = streams.report(opening=Runs(ran)).read_text("utf-8")
    opening = page[page.index("<body>") : page.index("<header>")]
    assert Runs(ran).headline() in html.unescape(opening)
    link = re.search(r'href="([^"]+)"', opening)
    assert link
    assert (tmp_path / "streams" / link[1]).resolve() == (ran / "index.html").resolve()
    assert (
        page.replace(opening, "<body>\n")[: plain.index("<footer>")] == plain.split("<footer>")[0]
    )


def test_load_gives_the_table_of_runs_and_of_packed_results(ran: Path, tmp_path: Path) -> None:
    keep(ran, tmp_path / "results")
    assert api.load(ran).markdown() == api.load(tmp_path / "results").markdown()
    assert api.report(ran, tmp_path / "page").read_text().startswith("<!doctype html>")


def test_documents_take_numbers_from_packed_results(ran: Path, tmp_path: Path) -> None:
    keep(ran, tmp_path / "results" / "tiny")
    results = Results(tmp_path / "results")
    whole = run_query("comparison tiny", results)
    assert whole.startswith(api.load(ran).markdown())
    assert "| KL |" in whole
    assert "| kl |" not in run_query("comparison tiny rows=adamw", results)
    assert run_query("forgetting tiny adamw manual at=trained", results) in ("1.00", "–")
    assert run_query("runs tiny", results) == "4"
    assert "| [tiny](tiny) | 4 |" in run_query("experiments", results)
    assert "at 90 % of" in run_query("comparison tiny columns=gain level=0.9", results)
    for wrong in (
        "comparison tiny rows=er",
        "comparison tiny columns=gian",
        "forgetting tiny kl latin",
        "forgetting tiny er code",
    ):
        with pytest.raises(UserError, match="unknown"):
            run_query(wrong, results)


def test_a_number_of_forgetting_is_that_of_the_table() -> None:
    found = compare_methods(list(hand_made()))
    assert forgetting_of(found, "gate", "english", "trained") == "0.38 (0.25 to 0.50)"
    assert forgetting_of(found, "gate", "english", "interpolated") == "0.10 (0.10 to 0.10)"
    assert forgetting_of(found, "gate", "english", "equal_time") == "0.20 (0.20 to 0.20)"
    with pytest.raises(UserError, match="equal_time"):
        forgetting_of(found, "gate", "english", "equal_time", 0.95)
    of_levels = [
        float(forgetting_of(found, "gate", "english", "trained", level).split()[0])
        for level in LEVELS
    ]
    assert sum(of_levels) / len(LEVELS) == pytest.approx(0.38, abs=0.01)


# Command ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_runs_reports_and_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "methods": {"adamw": {}}}))
    code, printed, said = called(capsys, "run", "tiny.yaml", "--workers", 1)
    assert (code, "AdamW" in printed) == (0, True), said
    assert "adamw-0" in said
    assert "new " in said
    code, printed, said = called(capsys, "run", "tiny.yaml", "--resume")
    assert (code, "1 of 1 run already done" in said) == (0, True), said
    code, printed, said = called(capsys, "report", "runs/tiny", "--markdown", "--figure", "f.svg")
    assert (code, printed.startswith("| method |")) == (0, True), said
    assert Path("f.svg").read_text().startswith("<?xml")
    code, printed, said = called(capsys, "keep", "runs/tiny")
    assert (code, "results/tiny has 1 run;" in printed) == (0, True), said


# Again --------------------------------------------------------------------------------------------


def test_recorded_trials_are_repeated_bit_for_bit(ran: Path, tmp_path: Path) -> None:
    recorded = read_runs(ran)
    again = repeat_finetuning(recorded, ran, None, 1)
    assert list(again.methods) == ["adamw"]  # and protect, where it is recorded
    with pytest.raises(UserError, match="2 were asked for, 1 are recorded"):
        repeat_finetuning(recorded, ran, ["all"], 2)
    run_all(tmp_path / "again", again)
    rows = repeated(recorded, read_runs(tmp_path / "again"))
    assert [(row.label, row.identical) for row in rows] == [
        *(("adamw.lr0.003", True), ("adamw.lr0.01", True)),
    ]


def test_other_losses_are_judged_by_the_spread_of_the_recorded_seeds() -> None:
    recorded = [made("adamw", seed, [point(2.0 + seed / 100, 1.4)]) for seed in range(3)]
    near = repeated(recorded, [made("adamw", 0, [point(2.02, 1.4)])])[0]
    far = repeated(recorded, [made("adamw", 0, [point(2.2, 1.4)])])[0]
    assert (near.identical, near.is_inside, far.is_inside) == (False, True, False)
    assert "OUTSIDE" in far.describe()[0]
    few = repeated(recorded[:2], [made("adamw", 0, [point(2.2, 1.4)])])[0]
    assert few.is_inside is None


# Configuration ------------------------------------------------------------------------------------


def test_trials_are_all_combinations_of_the_values_of_lists() -> None:
    of = experiment(methods={"ewc": {"lr": [0.1, 0.3], "strength": [1.0, 10.0]}}, seeds=[0, 1])
    runs = of.runs()
    assert [run.row for run in runs[:4]] == [
        *("ewc.lr0.1.strength1", "ewc.lr0.1.strength10"),
        *("ewc.lr0.3.strength1", "ewc.lr0.3.strength10"),
    ]
    assert len(runs) == 8
    assert runs[1].method == Component("ewc", {"lr": 0.1, "strength": 10.0})
    assert {run.family for run in runs} == {"ewc"}
    assert FinetuningExperiment.from_mapping(of.as_mapping()) == of


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"methods": {"adamw": {"lr": [0.1]}, "kl": {"lr": [0.1, 0.2]}}},
            "kl: number of trials is 2",
        ),
        ({"methods": {"adamw": {"lr": [0.1, "fast"]}}}, 'adamw.lr: got "fast"'),
        ({"methods": {"adamw": {"lr": [0.1, 0.1]}}}, "expected different values"),
        ({"methods": {"adamw": {"lr": []}}}, "adamw.lr: got"),
        ({"methods": {"adamv": {}}}, 'did you mean "adamw"'),
        ({"methods": {"adamw": {"rate": 1.0}}}, "adamw.rate: unknown option"),
        ({"texts": "latin"}, "texts.name"),
        ({"model": {"name": "byte", "width": 0}}, "model.width"),
        ({"training": {"shares": [1.5]}}, "training.shares"),
        ({"training": {"shares": [0.5, 1.0]}}, "training.shares"),
        ({"anchors": {"source": "web"}}, "anchors.source"),
        ({"stream": "digits"}, "stream: unknown option"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        experiment(**changes)
    assert said in str(error.value)


def test_rows_that_are_not_run_need_not_have_as_many_trials(tmp_path: Path) -> None:
    alone = api.select("finetune-demo", ["methods.protect.lr=0.01"], ["protect"])
    assert [run.row for run in alone.runs()] == ["protect"]
    with pytest.raises(UserError, match="number of trials is 1, but 3 for adamw"):
        api.select("finetune-demo", ["methods.protect.lr=0.01"], ["adamw", "protect"])


def test_rows_of_one_folder_have_as_many_trials(tmp_path: Path) -> None:
    """Whether they are run by one command or by two: they share a table."""
    one = experiment(methods={"adamw": {"lr": 0.1}})
    two = experiment(methods={"kl": {"lr": [0.1, 0.2]}})
    with make_plan(one, tmp_path).begin():
        pass
    with pytest.raises(UserError, match="kl: number of trials is 2, but 1 for adamw"):
        make_plan(two, tmp_path, if_there="resume")


def test_what_is_for_streams_alone_is_refused() -> None:
    with pytest.raises(UserError, match="this needs a stream"):
        api.tune(EXPERIMENT)
    with pytest.raises(UserError, match="--log"):
        api.run(EXPERIMENT, log=["tensorboard"])


@pytest.mark.parametrize("name", shipped("finetuning"))
def test_experiments_that_ship_can_be_read_and_are_listed_by_the_doctor(name: str) -> None:
    of = api.select(name)
    assert isinstance(of, FinetuningExperiment)
    assert of.name == name
    (listed,) = (line for line in findings() if line.startswith("fine-tuning experiments: "))
    assert name in listed.split(": ")[1].split(", ")


def test_settings_change_options_and_add_methods() -> None:
    of = api.select(EXPERIMENT, ["training.steps=7", "methods.ewc={lr: [0.1, 0.2]}"], ["ewc"])
    assert isinstance(of, FinetuningExperiment)
    assert of.training.steps == 7
    assert list(of.methods) == ["ewc"]
