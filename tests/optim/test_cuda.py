"""What only an accelerator can show; skipped without one."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from learning import CASES as METHODS
from learning import beginning, picture_tasks, weights
from measure import captured
from notebook import Interrupted, Notebook
from PIL import Image
from tiny import job, results
from torch import Tensor, nn
from torch.nn import functional

import syngap
from syngap import SynGAP
from syngap.bench import methods
from syngap.bench.methods import Method
from syngap.bench.methods.er import ER
from syngap.bench.methods.syngap import SynGAP as SynGAPMethod
from syngap.bench.runner.local import Event, run_local
from syngap.bench.runner.run import Job
from syngap.bench.streams import InMemory, Split, Stream, Tasks
from syngap.bench.streams.stream import Batch
from syngap.bench.training import train
from syngap.bench.training.loop import step_function
from syngap.bench.training.watch import Watch
from syngap.optim.basis import Basis, filter_along
from syngap.optim.directions import Directions, first_state, follow_scores, refresh

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch's own, on its threads
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    ).cuda()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator).cuda(),
            torch.randint(10, (16,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def train_step(model: nn.Module, optimizer: SynGAP, x: Tensor, y: Tensor, bf16: bool) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    optimizer.observe(logits)
    loss.backward()
    optimizer.step()


CASES = {
    "plain": {},
    "tensor scope": {"scope": "tensor"},
    "momentum": {"momentum": 0.9, "weight_decay": 1e-3},
    "exact": {"estimator": "exact"},
    "single tensor": {"foreach": False},
    "compact": {"compact": True},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_captured_step_equals_eager(options: dict[str, object], bf16: bool) -> None:
    data = batches(20)
    results = []
    for capture in (False, True):
        model = network()
        rate = torch.tensor(0.05, device="cuda")
        optimizer = SynGAP(model.parameters(), lr=rate, capturable=True, model=model, **options)
        x, y = data[0][0].clone(), data[0][1].clone()

        def step(m=model, o=optimizer, x=x, y=y) -> None:  # type: ignore[no-untyped-def]
            train_step(m, o, x, y, bf16)

        before = copy.deepcopy(model.state_dict())
        if capture:
            replay = captured(step)
        else:
            step()
            replay = step
        with torch.no_grad():  # warming up trained: begin both runs from the same place
            for name, value in model.state_dict().items():
                value.copy_(before[name])
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            torch.cuda.manual_seed(7)
        for new_x, new_y in data:
            x.copy_(new_x)
            y.copy_(new_y)
            replay()
        rate.fill_(0.01)  # a scheduler reaches a captured step through the tensor
        replay()
        results.append((model.state_dict(), optimizer.importance()))
    tolerance = 2e-2 if bf16 else 1e-4
    for eager, graph in zip(*results, strict=True):
        for name in eager:
            torch.testing.assert_close(graph[name], eager[name], rtol=tolerance, atol=tolerance)
    assert any(value.abs().max() > 0 for value in results[1][1].values())


def test_device_agrees_with_cpu() -> None:
    """Same labels, same trajectory, for each estimator."""
    for estimator in ("sampled", "exact"):
        runs = []
        for device in ("cpu", "cuda"):
            model = network().to(device).double()
            optimizer = SynGAP(
                model.parameters(), lr=0.05, estimator=estimator, model=model, retention=0.9
            )
            for x, y in batches(10):
                logits = model(x.to(device).double())
                drawn = torch.distributions.Categorical(logits=logits)
                labels = y.to(device)
                drawn.sample = lambda labels=labels: labels  # type: ignore[method-assign]
                optimizer.zero_grad()
                optimizer.observe(drawn)
                functional.cross_entropy(logits, labels).backward()
                optimizer.step()
            runs.append([param.detach().cpu() for param in model.parameters()])
        for on_cpu, on_device in zip(*runs, strict=True):
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-9, atol=1e-9)


def test_foreach_equals_single_tensor() -> None:
    for options in ({}, {"scope": "tensor"}, {"bounded": False, "consolidation": 0.01}):
        runs = []
        for foreach in (True, False):
            model = network()
            generator = torch.Generator("cuda").manual_seed(3)
            optimizer = SynGAP(
                model.parameters(),
                lr=0.05,
                momentum=0.5,
                weight_decay=1e-3,
                foreach=foreach,
                generator=generator,
                **options,
            )
            torch.backends.cudnn.deterministic = True
            for x, y in batches(5):
                train_step(model, optimizer, x, y, bf16=False)
            runs.append([param.detach() for param in model.parameters()])
        for lists, single in zip(*runs, strict=True):
            torch.testing.assert_close(lists, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 1e-3}])
def test_fused_equals_foreach(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(256, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(2304, 100)
        )
        model = model.cuda().to(memory_format=torch.channels_last)
        labels = torch.Generator("cuda").manual_seed(2)
        optimizer = SynGAP(model.parameters(), lr=0.05, fused=fused, generator=labels, **options)
        for _ in range(5):
            logits = model(x)
            optimizer.zero_grad()
            optimizer.observe(logits)
            logits.logsumexp(1).mean().backward()
            optimizer.step()
        results.append([*model.parameters(), *optimizer.importance()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_state_moves_between_devices() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(3):
        train_step(model, optimizer, x, y, bf16=False)
    on_cpu = copy.deepcopy(model).cpu()
    moved = SynGAP(on_cpu.parameters(), lr=0.05, momentum=0.9)
    moved.load_state_dict(optimizer.state_dict())
    for original, there in zip(optimizer.importance(), moved.importance(), strict=True):
        assert there.device.type == "cpu"
        assert torch.equal(original.cpu(), there)
    back = SynGAP(model.parameters(), lr=0.05, momentum=0.9)
    back.load_state_dict(moved.state_dict())
    for x, y in batches(2):
        train_step(model, back, x, y, bf16=False)
    assert all(param.isfinite().all() for param in model.parameters())


def test_float16_with_scaler_skips_and_goes_on() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=1000)
    skipped = 0
    for x, y in batches(40):
        with torch.autocast("cuda", torch.float16):
            logits = model(x)
            loss = functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        optimizer.observe(logits)
        scaler.scale(loss).backward()
        before = [value.clone() for value in optimizer.importance()]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            after = optimizer.importance()
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert 0 < skipped < 40
    assert optimizer.summary()["importance/mean"] > 0
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_observe_never_waits_when_capturable() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.05, capturable=True)
    data = batches(4)
    train_step(model, optimizer, *data[0], bf16=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in data[1:]:
            train_step(model, optimizer, x, y, bf16=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_of_exact_is_bounded() -> None:
    """Per-sample gradients are held in chunks, never for the whole batch."""
    x = torch.randn(256, 8, 1024, device="cuda")
    sequence = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 64)).cuda()
    optimizer = SynGAP(sequence.parameters(), lr=0.05, estimator="exact", model=sequence)
    logits = sequence(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.observe(logits)
    whole_batch = 256 * 1024 * 1024 * 4
    assert torch.cuda.max_memory_allocated() - before < whole_batch / 2


# Whole runs by graphs ----------------------------------------------------------------------------


# A bias before a BatchNorm has no gradient but rounding, which Adam and Ballistic blow up to a step
# of full length; the running mean follows it, and the network's output does not.
ROUNDING = ("0.bias", "1.running_mean")


@pytest.mark.parametrize("case", METHODS)
def test_a_captured_run_ends_where_an_eager_one_does(case: str) -> None:
    kind, options = METHODS[case]
    results = []
    for is_captured in (False, True):
        tasks = picture_tasks(per_class=13)
        stream = Stream(tasks, 0, batch=4, epochs=2)
        begin = beginning(case, stream, device="cuda", captured=is_captured)
        stream = stream.present(begin().sees).to(torch.device("cuda"))
        notebook = Notebook()
        method = train(stream, begin, notebook, evaluate_every=7)
        results.append((weights(method), notebook.evaluations))
    for name, value in results[0][0].items():
        if name not in ROUNDING or not {"adam", "ballistic"} & {kind, options.get("optimizer")}:
            torch.testing.assert_close(results[1][0][name], value, rtol=1e-3, atol=1e-4, msg=name)
    accuracies = [[one.accuracy for one in told] for _, told in results]
    torch.testing.assert_close(
        torch.tensor(accuracies[1]), torch.tensor(accuracies[0]), atol=17.0, rtol=0
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor's own differ from version to version
@pytest.mark.parametrize("case", ["er", "derpp", "syngap-teacher"])
def test_a_compiled_step_is_captured_and_learns_what_an_eager_one_does(case: str) -> None:
    results = []
    for fast in (False, True):
        stream = Stream(picture_tasks(per_class=13), 0, batch=4, epochs=2)

        def begin(options: dict[str, bool], stream: Stream = stream) -> Method:
            method = beginning(case, stream, device="cuda", **options)()
            for module in method.learner.model.modules():
                if isinstance(module, nn.Dropout):  # compiled code draws other numbers
                    module.p = 0.0
            return method

        start = partial(begin, {"captured": fast, "compiled": fast})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "steps are not")
            method = train(stream.to(torch.device("cuda")), start, Notebook())
        assert bool(method.learner.compiling) == fast
        results.append(weights(method))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


def test_graphs_are_replayed_and_not_python(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(picture_tasks(per_class=40), 0, batch=4, epochs=3)
    begin = beginning("syngap", stream, device="cuda", captured=True)
    calls = []
    learn = SynGAPMethod.learn
    monkeypatch.setattr(
        SynGAPMethod, "learn", lambda self, batch: (calls.append(1), learn(self, batch))
    )
    train(stream.to(torch.device("cuda")), begin, Notebook())
    assert 5 <= len(calls) <= 12 < len(stream) / 4


def test_what_cannot_be_captured_goes_on_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = ER.learn

    def looking(self: ER, batch: Batch) -> None:
        learn(self, batch)
        float(self.learner.parameters()[0].detach().sum())

    monkeypatch.setattr(ER, "learn", looking)
    stream = Stream(picture_tasks(per_class=13), 0, batch=4, epochs=2).to(torch.device("cuda"))
    eager = train(stream, beginning("er", stream, device="cuda"), Notebook())
    with pytest.warns(UserWarning, match="steps are not captured"):
        captured = train(stream, beginning("er", stream, device="cuda", captured=True), Notebook())
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(captured)[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_captured_run_goes_on_from_its_checkpoint() -> None:
    stream = Stream(picture_tasks(per_class=13), 0, batch=4, epochs=2)
    begin = beginning("syngap", stream, device="cuda", captured=True)
    stream = stream.to(torch.device("cuda"))
    whole = train(stream, begin, Notebook())
    broken = Notebook(keep_every=11, fails_at=30)
    with pytest.raises(Interrupted):
        train(stream, begin, broken)
    again = train(stream, begin, Notebook(checkpoint=broken.checkpoint))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(again)[name], value, rtol=1e-3, atol=1e-4, msg=name)


# The same bits with training.deterministic, in processes of their own -----------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six folders of noisy pictures; they are shifted and mirrored while training."""
    root = tmp_path_factory.mktemp("images")
    chance = np.random.default_rng(0)
    for label, ideal in enumerate(chance.integers(256, size=(6, 16, 16, 3))):
        (root / str(label)).mkdir()
        for number in range(80):
            noisy = (ideal + chance.integers(-60, 61, size=ideal.shape)).clip(0, 255)
            Image.fromarray(noisy.astype(np.uint8)).save(root / str(label) / f"{number}.png")
    return root


def repeating(folder: Path, images: Path, row: str, *settings: str) -> Job:
    options = "lr: 0.05" if row in ("sgd", "sgdm", "joint") else "lr: 0.01, buffer: 30, replay: 8"
    options = "lr: 0.001" if row in ("adam", "ballistic") else options
    return job(
        folder,
        f"stream={{name: folder, path: {images}, tasks: 3, batch: 8, epochs: 15}}",
        "model={name: resnet18, width: 8}",
        "training={device: cuda, deterministic: true, evaluate_every: 100}",
        "training.checkpoint_seconds=0.2",
        f"methods.{row}={{{options}}}",
        *settings,
        row=row,
    )


def finished(*jobs: Job, workers: int) -> None:
    events: list[Event] = []
    run_local(jobs, workers, events.append)
    assert [event.message for event in events if event.kind == "failed"] == []


def interrupted(broken: Job) -> None:
    """Leave a run as a kill does, between two checkpoints."""

    def pull_the_plug(event: Event) -> None:
        assert event.kind not in ("done", "failed"), event.message or "it ended too early"
        if event.kind == "step" and any((broken.folder / "checkpoint").glob("step-*")):
            raise Interrupted

    with pytest.raises(Interrupted):
        run_local([broken], 1, pull_the_plug)


@pytest.fixture
def no_quiet_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In worker processes, steps that cannot be captured are an error."""
    monkeypatch.setenv("PYTHONWARNINGS", "error:steps are not captured:UserWarning")


@pytest.mark.usefixtures("no_quiet_failures")
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("er", []),
        ("er", ["methods.er.average=0.9"]),
        ("derpp", []),
        ("syngap", []),
        ("syngap", ["training.precision=bf16", "methods.syngap.estimator=exact"]),
    ],
    ids=["er", "er averaged", "derpp", "syngap", "syngap exact bf16"],
)
def test_a_deterministic_run_repeats_bit_for_bit_also_when_it_was_interrupted(
    row: str, settings: list[str], captured: bool, images: Path, tmp_path: Path
) -> None:
    how = f"training.captured={str(captured).lower()}"
    once, again, broken = (
        repeating(tmp_path / name, images, row, how, *settings)
        for name in ("once", "again", "broken")
    )
    interrupted(broken)
    finished(broken, once, again, workers=3)
    assert results(once.folder) == results(again.folder)
    assert results(once.folder) == results(broken.folder)


@pytest.mark.usefixtures("no_quiet_failures")
def test_deterministic_runs_of_every_method_repeat_bit_for_bit(
    images: Path, tmp_path: Path
) -> None:
    rows = methods.registry.names()
    jobs = [
        repeating(tmp_path / f"{time}-{row}", images, row, "stream.epochs=2")
        for time in ("once", "again")
        for row in rows
    ]
    finished(*jobs, workers=5)
    for row in rows:
        assert results(tmp_path / f"once-{row}") == results(tmp_path / f"again-{row}"), row


# Numbers that are not finite ----------------------------------------------------------------------


def with_a_bad_sample(per_class: int) -> tuple[Stream, int]:
    """Pictures of which one is not a number, and the step at which it comes."""
    tasks = picture_tasks(per_class=per_class, augments=False)
    train_split, test = tasks.train, tasks.test
    x = train_split.samples.take(torch.arange(len(train_split.labels))).float() / 255
    x[len(x) // 2] = torch.nan
    good = test.samples.take(torch.arange(len(test.labels))).float() / 255
    stream = Stream(
        Tasks(
            Split(InMemory(x), train_split.labels, train_split.task),
            Split(InMemory(good), test.labels, test.task),
            tasks.classes,
        ),
        batch=4,
        epochs=1,
    )
    (at,) = [step for step in range(len(stream)) if stream[step].x.isnan().any()]
    return stream.to(torch.device("cuda")), at + 1


def is_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("case", ["sgd", "er", "ewcpp", "syngap"])
def test_a_run_names_the_first_step_that_was_not_finite_and_keeps_nothing_of_it(
    case: str, captured: bool
) -> None:
    stream, at = with_a_bad_sample(per_class=40)
    journal = Notebook(keep_every=9)
    begin = beginning(case, stream, device="cuda", captured=captured)
    with pytest.raises(FloatingPointError, match=rf"of step {at} of \d+, task \d of 3,"):
        train(stream, begin, journal, evaluate_every=5)
    assert all(saved < at for saved in journal.saved)
    assert all(evaluation.step < at for evaluation in journal.evaluations)
    kept = journal.load()
    assert kept is None or is_finite(kept["method"]["learner"]["model"])


@pytest.mark.parametrize("case", METHODS)
def test_a_captured_run_at_an_absurd_rate_ends_with_the_step_and_another_rate(case: str) -> None:
    stream = Stream(picture_tasks(per_class=13), 0, batch=4, epochs=2)
    begin = beginning(case, stream, device="cuda", captured=True)

    def absurd() -> Method:
        method = begin()
        for group in method.optimizer.param_groups:
            group["lr"] = 1e30
        return method

    stream = stream.present(begin().sees).to(torch.device("cuda"))
    journal = Notebook(keep_every=5)
    with pytest.raises(FloatingPointError, match=r"it is 1e\+30, try 0"):
        train(stream, absurd, journal)
    kept = journal.load()
    assert kept is None or is_finite(kept["method"]["learner"]["model"])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_looking_for_numbers_that_are_not_finite_waits_for_no_gpu() -> None:
    stream = Stream(picture_tasks(per_class=80), 0, batch=2, epochs=1).to(torch.device("cuda"))
    method = beginning("er", stream, device="cuda", captured=True)()
    take, watch, warm = step_function(method), Watch(method, stream, 0), 12
    batches = [stream[step] for step in range(140)]
    for step, batch in enumerate(batches[:warm], 1):
        watch.step(take, batch, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches[warm:], warm + 1):
            watch.step(take, batch, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    watch.check(140)


@pytest.mark.filterwarnings("ignore:steps are not captured")
@pytest.mark.parametrize("case", ["er", "syngap", "syngap-exact", "ewcpp", "derpp"])
def test_a_bad_batch_is_skipped_on_a_gpu(case: str) -> None:
    stream, at = with_a_bad_sample(per_class=13)
    begin = beginning(case, stream, device="cuda", captured=True, non_finite="skip")
    journal = Notebook()
    method = train(stream, begin, journal)
    assert journal.told[-1][1]["skipped"] == 1
    assert all(value.isfinite().all() for value in method.finite_tensors())
    other = beginning(case, stream, device="cuda")()
    for step in range(len(stream)):
        if step + 1 != at:
            other.step(stream[step])
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(method)[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_are_not_finite_move_nothing_on_a_gpu(fused: bool) -> None:
    param = nn.Parameter(torch.randn(300, 300, device="cuda"))
    before = param.detach().clone()
    param.grad = torch.randn_like(param)
    param.grad[7, 7] = torch.inf
    skipping = SynGAP([param], lr=0.1, momentum=0.9, fused=fused, non_finite="skip")
    skipping.step()
    assert skipping.skipped == 1
    with pytest.raises(FloatingPointError, match="gradients of step 1"):
        SynGAP([param], lr=0.1, momentum=0.9, fused=fused).step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("rotate", [True, False])
def test_a_protected_model_learns_on_the_device_and_keeps_more(rotate: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 16, device="cuda"), torch.randint(4, (256,), device="cuda")
    kept = []
    for gate in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        protection = syngap.protect(
            model, x, gate=gate, teacher=False, rank="full", rotate=rotate if gate else None
        )
        optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(x.flip(1)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        kept.append(protection.report().kl)
    assert kept[1] < kept[0] / 2


def test_updates_through_directions_are_exact() -> None:
    """Of weights of equal shape, and of one alone: a closed gate lets 0.01 through."""
    shapes = [(64, 32, 3, 3)] * 3 + [(100, 512)]
    torch.manual_seed(0)
    updates = [torch.randn(shape, device="cuda") for shape in shapes]
    updates[1] = updates[1].contiguous(memory_format=torch.channels_last)
    bases, masks = [], []
    for update in updates:
        matrix = update.flatten(1).double()
        left, right = (torch.linalg.qr(torch.randn(n, n).cuda()).Q for n in matrix.shape)
        bases.append(Basis(left, right))
        masks.append(torch.full_like(update.flatten(1), 0.01))
    found = filter_along(updates, masks, bases)
    for each, update in zip(found, updates, strict=True):
        off = (each - 0.01 * update).norm() / update.norm()
        assert off < 1e-5


def test_directions_on_a_gpu_are_orthonormal_and_refreshed_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    state = first_state(torch.zeros(48, 32), Directions())
    for _ in range(3):
        score = torch.randn(48, 32) * torch.logspace(0, -3, 32)
        follow_scores(state, {"left_moment": score @ score.T, "right_moment": score.T @ score}, 0.5)
    there = {name: value.cuda() for name, value in state.items()}
    for _ in range(4):
        refresh(state)
        refresh(there)
    for name in ("left", "right"):
        side = there[name].cpu()
        torch.testing.assert_close(side.T @ side, torch.eye(len(side)), rtol=0, atol=1e-5)
    largest = (there["right"].cpu()[:, :4] * state["right"][:, :4]).sum(0).abs()
    torch.testing.assert_close(largest, torch.ones(4), rtol=0, atol=1e-3)
