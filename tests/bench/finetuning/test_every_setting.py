"""Every method on encoders and classifiers: it learns and goes on bit for bit, or is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finetuned import EXPERIMENT, classifier_setting, encoder_setting
from torch import nn

from syngap.bench import api, seeds
from syngap.bench.config.experiment import read, shipped
from syngap.bench.config.finetuning import FinetuningExperiment, parse_experiment
from syngap.bench.errors import UserError
from syngap.bench.finetuning import images, methods, models
from syngap.bench.finetuning.loop import interpolate
from syngap.bench.finetuning.methods import Method
from syngap.bench.finetuning.methods.crispedit import CrispEdit
from syngap.bench.finetuning.methods.ewc import EWC
from syngap.bench.finetuning.methods.freeze import Freeze
from syngap.bench.finetuning.methods.kl import mean_divergence
from syngap.bench.finetuning.methods.l2_sp import L2SP
from syngap.bench.finetuning.methods.protect import Protect
from syngap.bench.finetuning.methods.replay import Replay
from syngap.bench.finetuning.setting import Setting
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import make_plan
from syngap.bench.runner.recorded import repeat_finetuning
from syngap.bench.store.folder_reader import read_run, read_runs
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.store.keep import keep
from syngap.bench.store.outcome import Run
from syngap.bench.training.checkpoint import pack, unpack

SETTINGS: dict[str, Callable[[], Setting]] = {
    "pairs": encoder_setting,
    "images": classifier_setting,
}
REFUSED = {
    **{("own_samples", task): "no own samples" for task in SETTINGS},
    **{(name, "images"): "adapters are for linear layers" for name in ("lora", "osf", "corda")},
}
NEED_PEFT = ("lora", "osf", "corda")
FEW: dict[str, dict[str, Any]] = {name: {"anchors": 1} for name in ("kl", "teacher", "protect")}
each_task = pytest.mark.parametrize("task", SETTINGS)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiny models and images known to configurations."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for registry, name in (
        (models.encoders, "tiny_encoder"),
        (models.classifiers, "tiny_classifier"),
        (images.registry, "tiny_images"),
    ):
        entry = EntryPoint(name, f"finetuned:{name}", registry.group)
        monkeypatch.setitem(registry._builtin, name, entry)


def given(task: str, **changes: Any) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {
        "pairs": {"pairs": {"name": "python", "characters": 40_000}, "model": "tiny_encoder"},
        "images": {
            "images": "tiny_images",
            "model": "tiny_classifier",
            "anchors": {"count": 8},
        },
    }
    plain = {key: value for key, value in copy.deepcopy(EXPERIMENT).items() if key != "texts"}
    return {**plain, **parts[task], **changes}


def experiment(task: str, **changes: Any) -> FinetuningExperiment:
    found = parse_experiment(given(task, **changes))
    assert isinstance(found, FinetuningExperiment)
    return found


def run_all(out: Path, of: FinetuningExperiment) -> None:
    plan = make_plan(of, out, if_there="resume")
    with plan.begin():
        for job in plan.jobs:
            run_here(job)


def losses(run: Run) -> list[tuple[Any, ...]]:
    return [(p.step, p.share, p.new, dict(p.old), p.exact, p.old_exact) for p in run.points]


def values(method: Method) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in method.model.named_parameters()}


# Methods ------------------------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize("name", methods.registry.names())
def test_every_method_learns_and_goes_on_bit_for_bit_or_is_refused_by_name(
    name: str, task: str
) -> None:
    if (name, task) in REFUSED:
        with pytest.raises(UserError, match=rf"methods\.{name}: .*{REFUSED[name, task]}"):
            experiment(task, methods={"adamw": {}, name: {}})
        return
    if name in NEED_PEFT:
        pytest.importorskip("peft")
    assert experiment(task, methods={name: {}}).methods
    of = SETTINGS[task]()
    options = {"rank": 2} if name in ("lora", "corda") else FEW.get(name, {})
    kind = partial(methods.registry.get(name), **options)
    whole, half = kind(of), kind(of)
    start = values(whole)
    whole.step(of.batch(4, "batch 0"))
    half.step(of.batch(4, "batch 0"))
    resumed = kind(of)
    resumed.load_state_dict(unpack(pack(half.state_dict())))
    whole.step(of.batch(4, "batch 1"))
    resumed.step(of.batch(4, "batch 1"))
    ended = values(whole)
    assert any(not torch.equal(ended[key], start[key]) for key in start)
    for key, value in values(resumed).items():
        assert torch.equal(value, ended[key]), key
    assert list(whole.weights()) == [key for key, _ in of.start.named_parameters()]


def test_what_a_task_has_no_anchors_from_is_refused() -> None:
    for task, there in (("pairs", "text"), ("images", "images")):
        assert experiment(task).anchors.source == there
        with pytest.raises(UserError, match=rf'anchors\.source: got "own".*there is "{there}"'):
            experiment(task, anchors={"source": "own"})
    with pytest.raises(UserError, match="images: unknown option"):
        experiment("pairs", images="tiny_images")
    with pytest.raises(UserError, match=r'model\.name: .*"byte"'):
        experiment("pairs", model="byte")


@pytest.mark.parametrize("make", [Freeze, CrispEdit, L2SP])
def test_a_new_head_learns_with_methods_that_hold_other_weights(
    make: Callable[..., Method],
) -> None:
    of = classifier_setting()
    method = make(of)
    method.step(of.batch(4, "batch 0"))
    for name in of.new_parameters:
        moved = method.model.get_parameter(name).detach()
        assert not torch.equal(moved, of.start.get_parameter(name)), name


def test_l2_sp_leaves_a_new_head_out_of_the_penalty() -> None:
    of = classifier_setting()
    method = L2SP(of, strength=2.0)
    with torch.no_grad():
        method.model.get_parameter("new_head.weight").fill_(1.0)
        method.model.get_parameter("head.bias").add_(0.5)
    batch = of.batch(4, "batch 0")
    added = method.loss(batch) - of.loss(method.model, batch)
    assert float(added.detach()) == pytest.approx(3 * 0.25)


def test_interpolation_keeps_a_new_head_as_trained() -> None:
    of = classifier_setting()
    model = copy.deepcopy(of.start)
    trained = {name: param.detach() + 1 for name, param in of.start.named_parameters()}
    interpolate(model, of.start, trained, 0.25, of.new_parameters)
    for name, param in model.named_parameters():
        way = 1.0 if name in of.new_parameters else 0.25
        torch.testing.assert_close(param, of.start.get_parameter(name) + way)


def test_replay_mixes_old_pairs_and_old_images_with_their_labels() -> None:
    of = classifier_setting()
    mixed, labels = Replay(of, share=1.0).mixed(of.batch(6, "batch 0"))
    assert torch.equal(labels, of.old_batch(6, "old text 0")[1])
    assert int(labels.max()) < of.classes
    assert mixed.shape == (6, 3, 6, 6)
    pairs = encoder_setting()
    first, second = Replay(pairs, share=1.0).mixed(pairs.batch(4, "batch 0"))
    told = pairs.old_batch(4, "old text 0")
    assert torch.equal(first, told[0])
    assert torch.equal(second, told[1])


def test_the_divergence_of_embeddings_is_half_the_squared_distance_over_the_variance() -> None:
    of = encoder_setting()
    method = Method(of)
    with torch.no_grad():
        for param in method.model.parameters():
            param.mul_(1.1)
    before, now = (of.embed(model, of.anchors).detach() for model in (of.start, method.model))
    told = sum(float(((a - b) ** 2).sum()) / 2 / 0.05**2 for a, b in zip(before, now, strict=True))
    found = mean_divergence(of.predict(of.start, of.anchors), of.predict(method.model, of.anchors))
    assert float(found.detach()) == pytest.approx(told / len(of.anchors), rel=1e-3)
    protected = Protect(of, strength=2.0, anchors=len(of.anchors))
    protected.model.load_state_dict(method.model.state_dict())
    batch = of.batch(4, "batch 0")
    added = protected.loss(batch) - of.loss(protected.model, batch)
    assert float(added.detach()) == pytest.approx(2.0 * told / len(of.anchors), rel=1e-3)


def test_ewc_of_an_encoder_squares_the_scores_of_drawn_embeddings() -> None:
    of = encoder_setting(anchors=2)
    method = EWC(of)
    params = list(of.start.parameters())
    told = [torch.zeros_like(param) for param in params]
    torch.manual_seed(seeds.derive(of.seed, "set-up"))
    for tokens in of.anchors:
        embedding = of.embed(of.start, tokens[None])
        drawn = torch.normal(embedding.detach(), 0.05)
        log_p = -((drawn - embedding) ** 2).sum() / (2 * 0.05**2)
        for total, grad in zip(told, torch.autograd.grad(log_p, params), strict=True):
            total += grad**2 / len(of.anchors)
    for found, expected in zip(method.fisher, told, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


# Runs ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a kill looks like from within."""


@each_task
@pytest.mark.parametrize("name", ["adamw", "protect"])
def test_a_killed_run_resumes_to_the_same_bits(
    name: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = experiment(task, methods={name: {}})
    run_all(tmp_path / "whole", of)
    with monkeypatch.context() as patched:
        advance = FolderJournal.advance

        def killed(self: FolderJournal, step: int) -> bool:
            if step > 3:
                raise Killed
            return advance(self, step)

        patched.setattr(FolderJournal, "advance", killed)
        with pytest.raises(Killed):
            run_all(tmp_path / "killed", of)
    assert not read_run(tmp_path / "killed" / f"{name}-0").done
    run_all(tmp_path / "killed", of)
    resumed, whole = (read_run(tmp_path / which / f"{name}-0") for which in ("killed", "whole"))
    assert whole.done
    assert losses(resumed) == losses(whole)


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    def run(task: str) -> Path:
        run_all(tmp_path / task, experiment(task))
        return tmp_path / task

    return run


@pytest.mark.parametrize(
    ("task", "old", "said"),
    [
        ("pairs", ["manual", "code"], "the rise of 1 - Spearman's correlation"),
        ("images", ["objects", "animals"], "the rise of the cross-entropy on old images"),
    ],
)
def test_results_are_kept_reported_and_repeated(
    task: str, old: list[str], said: str, ran: Callable[[str], Path], tmp_path: Path
) -> None:
    out = ran(task)
    runs = read_runs(out)
    assert all(list(run.points[0].old) == old for run in runs)
    assert all(list(run.points[-1].old_exact or {}) == old for run in runs)
    keep(out, tmp_path / "kept")
    packed = read_runs(tmp_path / "kept")
    assert [run.points for run in packed] == [run.points for run in runs]
    text = api.load(tmp_path / "kept").markdown()
    assert text == api.load(out).markdown()
    name = {"pairs": "pairs found", "images": "accuracy"}[task]
    assert f"| {name} ↑ | {old[0]}, {name} ↑ |" in text
    assert said in text
    assert api.report(out, tmp_path / "page").read_text().startswith("<!doctype html>")
    again = repeat_finetuning(runs, out, None, 1)
    assert again.as_mapping()[task] == experiment(task).as_mapping()[task]
    more = make_plan(experiment(task), out, if_there="resume")
    assert not more.jobs


@each_task
def test_a_configuration_reads_back_as_itself(task: str) -> None:
    of = experiment(task)
    assert parse_experiment(of.as_mapping()) == of
    changed = api.select(given(task), ["training.steps=7", f"{task}.name={of.source.name}"])
    assert changed.training.steps == 7  # type: ignore[union-attr]


def test_statistics_of_batch_norms_stay_those_of_the_start() -> None:
    of = classifier_setting()
    method = Method(of, lr=0.1)
    method.step(of.batch(4, "batch 0"))
    for module in method.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert not module.training
            assert torch.equal(module.running_mean, torch.zeros(6))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", shipped("finetuning"))
def test_every_row_of_a_shipped_experiment_has_as_many_trials_as_the_others(name: str) -> None:
    of = parse_experiment(read(name))
    assert isinstance(of, FinetuningExperiment)
    assert of.name == name
    assert len({len(of.select([row], [0]).runs()) for row in of.methods}) == 1


def test_rows_of_smollm2_that_are_recorded_stay_as_they_are() -> None:
    path = Path(__file__).parents[3] / "results" / "finetune-smollm2" / "experiment.yaml"
    if not path.is_file():
        pytest.skip("there are no results beside the tests")
    recorded = yaml.safe_load(path.read_text("utf-8"))["methods"]
    now = parse_experiment(read("finetune-smollm2")).as_mapping()["methods"]
    assert {row: now[row] for row in recorded} == recorded
