"""What goes wrong with `syngap.protect` says so, and leaves everything as it was."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_identical, values_of
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.utils.data import DataLoader, Dataset, TensorDataset

import syngap
from syngap import SynGAP
from syngap.optim import knowledge
from syngap.optim.errors import NotFiniteError
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import Protection, plan_memory
from syngap.protection.participation import Participation
from syngap.protection.pending import Pending

pytestmark = pytest.mark.filterwarnings("ignore:the weights are b?float16")


class Classifier(nn.Module):
    """A classifier with everything that a failure might change."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return out


def classifier(**options: Any) -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Classifier(**options)


def inputs(rows: int = 40) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def everything(model: nn.Module) -> Any:
    """Copies of all that protect() must leave alone."""
    return copy.deepcopy(
        {
            "values": dict(model.state_dict()),
            "members": [id(param) for param in model.parameters()],
            "gradients": [param.grad for param in model.parameters()],
            "trainable": [param.requires_grad for param in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "hooks": [len(module._forward_hooks) for module in model.modules()],
            "random": torch.get_rng_state(),
        }
    )


@pytest.fixture
def model() -> Iterator[Classifier]:
    """A model of which nothing may change in the test."""
    found = classifier()
    found.norm.train()
    found.dropout.eval()
    for param in found.parameters():
        param.grad = torch.ones_like(param)
    before = everything(found)
    yield found
    assert_identical(everything(found), before)


# Options ------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[str, Any]] = [
    *(("rank", value) for value in (0, -1, 0.0, 1.5, True, "half", torch.nan, (1,))),
    *((name, v) for name in ("anchors", "every", "batch_size") for v in (0, -1, 1.5, True, "8")),
    *(("strength", value) for value in (0, -1.0, torch.nan, torch.inf, "1", True)),
    *(("consolidation", value) for value in (0.0, 1.0, torch.nan, "0.5")),
    *(("ambient", value) for value in (-0.1, 1.0, torch.nan)),
    *(("rotate", value) for value in (1, "yes")),
    *((name, value) for name in ("gate", "teacher") for value in (None, 1)),
    *(("seed", value) for value in (0.5, None, True)),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
def test_an_option_out_of_range_is_named(model: nn.Module, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*got "):
        syngap.protect(model, inputs(), **{name: value})


@pytest.mark.parametrize("predict", ["logits", "", 3, torch.zeros(3)], ids=type)
def test_what_is_no_function_cannot_predict(model: nn.Module, predict: Any) -> None:
    acts: list[Callable[..., Any]] = [
        syngap.protect,
        plan_memory,
        SynGAP(model.parameters(), lr=0.1).consolidate,
    ]
    for act in acts:
        with pytest.raises(ValueError, match=r"predict must be a function that .* for a batch"):
            act(model, inputs(), predict=predict)


@pytest.mark.parametrize("group", ["nope", "", 2, True, [0, 1]])
def test_what_is_no_group_of_processes_is_refused_by_all(model: nn.Module, group: Any) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: syngap.protect(model, inputs(), process_group=group),
        lambda: SynGAP(model.parameters(), lr=0.1, process_group=group),
        lambda: SynGAP.wrap(AdamW(model.parameters()), process_group=group),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"process_group must be 'auto', None or a .*, got"):
            make()


@pytest.mark.parametrize("share", [-0.1, 1.1, torch.nan, torch.inf, "half", True, None])
def test_a_share_out_of_range_moves_nothing(model: nn.Module, share: Any) -> None:
    protection = syngap.protect(model, inputs())
    with pytest.raises(ValueError, match=r"share must be .*in \[0, 1\], got"):
        protection.interpolate(share)
    assert protection.report().parts == ()


@pytest.mark.parametrize("percent", [2, 50, 85.0, 100])
def test_a_share_in_per_cent_is_answered_with_the_share(model: nn.Module, percent: float) -> None:
    protection = syngap.protect(model, inputs())
    for share in (percent, torch.tensor([percent])):
        with pytest.raises(ValueError, match=rf"such as {percent / 100:g} for {percent:g} %, got"):
            protection.interpolate(share)  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "protect": (syngap.protect, lambda model: (model, inputs())),
    "plan_memory": (plan_memory, lambda model: (model, inputs())),
    "own_samples": (syngap.own_samples, lambda model: (model,)),
    "SynGAP": (SynGAP, lambda model: (model.parameters(),)),
    "SynGAP.wrap": (SynGAP.wrap, lambda model: (AdamW(model.parameters()),)),
}
ARGUMENTS = [
    (called, name)
    for called, (function, _) in CALLS.items()
    for name, each in inspect.signature(function).parameters.items()
    if each.kind is each.KEYWORD_ONLY
]


@pytest.mark.parametrize(("called", "name"), ARGUMENTS)
def test_a_misspelt_argument_is_answered_with_the_right_one(
    model: nn.Module, called: str, name: str
) -> None:
    function, arguments = CALLS[called]
    for wrong in (name[:-1], name.replace("_", "") + "s", name.title()):
        if (called, wrong) not in ARGUMENTS:
            message = rf'^{called}\(\) has no argument "{wrong}"; did you mean "{name}"'
            with pytest.raises(TypeError, match=message):
                function(*arguments(model), **{wrong: 1})


def test_a_symbol_of_the_paper_is_answered_with_its_argument(model: nn.Module) -> None:
    names = {"tau": "consolidation", "epsilon": "ambient", "alpha": "strength", "lam": "strength"}
    for symbol, name in names.items():
        with pytest.raises(TypeError, match=f'"{symbol}"; did you mean "{name}"'):
            syngap.protect(model, inputs(), **{symbol: 0.5})
    with pytest.raises(TypeError, match=r'"lr"; there are model, known, gate, .*, progress$'):
        syngap.protect(model, inputs(), lr=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match='"eta"; did you mean "lr"'):
        SynGAP(model.parameters(), eta=0.5)  # type: ignore[call-arg]


def trained(steps: int, calls: int, **options: Any) -> Any:
    """The protection of a model that knows something after some steps and calls of loss()."""
    model = classifier().eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
    protection = syngap.protect(model, inputs(), **options)
    optimizer = protection.optimizer(SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        loss = model(inputs()).logsumexp(1).mean()
        optimizer.zero_grad()
        (loss + protection.loss() if step < calls else loss).backward()
        optimizer.step()
    return protection


@pytest.mark.parametrize("options", [{}, {"gate": False}, {"teacher": False}])
def test_a_report_before_training_says_so(options: dict[str, bool]) -> None:
    assert trained(0, 0, **options).report().advice == ("Nothing has been trained yet.",)
    assert "Protected by" not in str(trained(0, 0, **options).report())
    assert "yet" not in str(trained(1, 1, **options).report())


@pytest.mark.parametrize("sharper", [1, 20])
def test_a_report_says_where_the_former_answers_are_those_of_an_untrained_model(
    sharper: int,
) -> None:
    model = classifier().eval()
    with torch.no_grad():
        model.head.weight.mul_(sharper)
    said = str(syngap.protect(model, inputs()).report())
    assert ("The former answers are nearly uniform" in said) == (sharper == 1)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("steps", "calls"), [(1, 0), (4, 0), (4, 2), (4, 4)])
def test_a_report_says_where_the_loss_of_the_teacher_was_forgotten(
    gate: bool, steps: int, calls: int
) -> None:
    said = trained(steps, calls, gate=gate).report()
    share = f"{calls} of {steps} step{'s' if steps > 1 else ''}" if gate else "no step"
    sentence = f"The teacher took part in {share}: add protection.loss() to the loss of each."
    assert said.advice == ((sentence,) if calls < (steps if gate else 1) else ())
    assert (sentence in str(said)) == bool(said.advice)
    assert trained(steps, 0, gate=gate, teacher=False).report().advice == ()


def test_the_report_names_the_parts_that_were_used(model: nn.Module) -> None:
    """Not those that the base optimizer went around."""
    model = copy.deepcopy(model)
    protection = syngap.protect(model, inputs())
    base = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer = protection.optimizer(base)
    model(inputs()).square().sum().backward()
    base.step()
    said = protection.report()
    assert said.parts == ()
    assert "The gate took no part: call step() of what protection.optimizer() returned" in str(said)
    optimizer.step()
    assert protection.report().parts == ("gate",)
    assert "took no part" not in str(protection.report())
    protection.loss()
    protection.loss().detach()
    with torch.no_grad():
        protection.loss()
    assert protection.report().parts == ("gate",)  # computed, and in no gradient
    protection.loss().backward()  # type: ignore[no-untyped-call]
    assert protection.report().parts == ("gate", "teacher")


@pytest.mark.parametrize("every", [1, 2, 3])
def test_losses_that_no_gradient_is_taken_of_do_not_count(model: nn.Module, every: int) -> None:
    model = copy.deepcopy(model)
    protection = syngap.protect(model, inputs(), gate=False, every=every)
    for _ in range(6):
        protection.loss()
    assert protection.report().parts == ()
    for _ in range(every):
        loss = protection.loss()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]  # counts once
    assert protection.report().parts == ("teacher",)
    assert protection._participation.unused == 6 // every


def test_nothing_waits_for_a_pending_loss_that_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's pass is to run beside the forward pass of the new batch."""
    waited: list[object] = []
    stream = type("Stream", (), {"wait_event": lambda self, event: waited.append(event)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    weight = torch.ones(3, requires_grad=True)
    participation = Participation()
    pending = participation.watch(Pending.of(weight.sum(), "written"))  # type: ignore[arg-type]
    assert waited == []
    assert participation.unused == 1
    (pending + 1.0).backward()
    assert waited
    assert participation.unused == 0


@pytest.mark.parametrize("gate", [True, False])
def test_a_loop_without_the_teachers_loss_is_warned_once(model: nn.Module, gate: bool) -> None:
    def train(steps: int, *, teacher: bool, calls: bool = False) -> None:
        subject = copy.deepcopy(model)
        protection = syngap.protect(subject, inputs(), gate=gate, teacher=teacher)
        optimizer = protection.optimizer(torch.optim.AdamW(subject.parameters(), 1e-3))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = subject(inputs()).square().sum()
            (loss + protection.loss() if calls else loss).backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(15, teacher=True)
        train(40, teacher=False)
        train(40, teacher=True, calls=True)
        assert said == []
        train(40, teacher=True)
    assert [str(each.message)[:49] for each in said] == [
        "16 steps were taken without protection.loss(), so"
    ]


def test_a_resumed_loop_without_the_teachers_loss_is_warned() -> None:
    model = classifier()
    protection = syngap.protect(model, inputs())
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["drawn"] = 10
    optimizer.load_state_dict(state)
    model(inputs()).square().sum().backward()
    for _ in range(16):
        optimizer.step()
    with pytest.warns(UserWarning, match=r"16 steps were taken without protection\.loss"):
        optimizer.step()


def test_a_teacher_that_is_left_out_for_a_while_is_warned_of_once() -> None:
    model = classifier()
    protection = syngap.protect(model, inputs())
    base = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer = protection.optimizer(base)
    model(inputs()).square().sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            protection.loss()
            for _ in range(20):
                optimizer.step()
    assert len(said) == 1


def test_a_gate_without_an_optimizer_is_warned_of(model: Classifier) -> None:
    protection = syngap.protect(model, inputs())
    for _ in range(15):
        protection.loss()
    with pytest.warns(UserWarning, match=r"protection\.optimizer\(\) never, so the gate"):
        protection.loss()


@pytest.mark.parametrize("kept", [True, False])
def test_steps_around_the_gate_are_warned_of(model: nn.Module, kept: bool) -> None:
    subject = copy.deepcopy(model)
    protection = syngap.protect(subject, inputs(), teacher=False)
    base = torch.optim.AdamW(subject.parameters(), 1e-3)
    gated = protection.optimizer(base)
    subject(inputs()).square().sum().backward()
    for _ in range(20):
        gated.step()
    if not kept:
        del gated
    for _ in range(15):
        base.step()
    with pytest.warns(UserWarning, match="AdamW made 16 steps by itself, so the gate took no part"):
        base.step()


def test_results_of_loss_that_nobody_uses_are_warned_of(model: nn.Module) -> None:
    protection = syngap.protect(copy.deepcopy(model), inputs(), gate=False, every=1)
    for _ in range(40):
        protection.loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for _ in range(40):
            protection.loss()
    for _ in range(16):
        protection.loss().item()
    with pytest.warns(UserWarning, match=r"no gradient was taken of 16 results.*not its item"):
        protection.loss()


def test_a_report_without_a_gate_says_nothing_of_directions(model: nn.Module) -> None:
    protection = syngap.protect(copy.deepcopy(model), inputs(), gate=False)
    assert "of parameters" not in str(protection.report())


class Around(torch.optim.Optimizer):
    """An optimizer around another, as accelerate prepares it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_an_optimizer_around_another_is_refused_with_what_to_do(model: nn.Module) -> None:
    base = Around(torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match=r"got Around.*accelerator\.prepare\(protection\.optimizer"):
        syngap.protect(model, inputs()).optimizer(base)
    assert syngap.protect(model, inputs(), gate=False).optimizer(base) is base


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_moments_of_earlier_steps_are_not_taken_for_rotated_ones(
    model: nn.Module, kind: type[torch.optim.Adam]
) -> None:
    """They are along entries, so the finished update is filtered."""
    model = copy.deepcopy(model)
    base = kind(model.parameters(), 0.1, weight_decay=0.0)
    for _ in range(3):
        base.zero_grad()
        model(inputs()).square().sum().backward()
        base.step()
    optimizer = syngap.protect(model, inputs(), rank="full").optimizer(base)
    assert not optimizer.param_groups[0]["rotated"]
    again = syngap.protect(model, inputs(), rank="full", rotate=True)
    with pytest.raises(ValueError, match="rotate=True needs an optimizer that has made no step"):
        again.optimizer(base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_in_half_precision_are_warned_of_where_they_learn(dtype: torch.dtype) -> None:
    half = classifier().to(dtype)
    message = f"the weights are {str(dtype)[6:]}.*load the model in float32"
    with pytest.warns(UserWarning, match=message):
        syngap.protect(half, inputs().to(dtype))
    half.first.requires_grad_(False)
    half.norm.float(), half.head.float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syngap.protect(half, inputs().to(dtype), predict=lambda x: half.head(half.first(x).float()))


@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_without_a_gradient_does_not_count(every: int) -> None:
    model = classifier()
    first, second = (syngap.protect(model, inputs(), anchors=4, every=every) for _ in range(2))
    expected = [first.loss().item() for _ in range(6)]
    found = []
    for _ in range(6):
        with torch.no_grad():
            second.loss()
        found.append(second.loss().item())
    assert found == expected


def test_a_token_that_the_model_does_not_have_is_named() -> None:
    writer = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    with pytest.raises(IndexError, match="largest token is 31, and the model has 20: take the tok"):
        syngap.protect(writer, torch.full((16, 4), 31))


@pytest.mark.parametrize("wrapped", [lambda row: row, lambda row: {"x": row}])
def test_rows_without_a_batch_dimension_say_what_to_pass(
    model: nn.Module, wrapped: Callable[[Tensor], Any]
) -> None:
    rows = [wrapped(inputs()[0]), wrapped(inputs()[1])]
    with pytest.raises((ValueError, RuntimeError, IndexError), match=r"\[x\[None\] for x in known"):
        syngap.protect(model, rows)


def test_a_model_that_does_not_take_the_inputs_says_which(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="known inputs: mat1 and"):
        syngap.protect(model, torch.zeros(16, 3))
    with pytest.raises(TypeError, match=r"known inputs: .*not str"):
        syngap.protect(model, ["one", "two"])


def test_a_tuple_of_tensors_is_not_a_list_of_batches(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"known is a tuple of 2 tensors.*pass \[known\]"):
        syngap.protect(model, (inputs(), inputs()))


def test_probabilities_in_place_of_logits_are_warned_of(model: nn.Module) -> None:
    with pytest.warns(UserWarning, match="positive and sum to one"):
        syngap.protect(model, inputs(), predict=lambda x: model(x).softmax(-1), gate=False)


# Known inputs -------------------------------------------------------------------------------------


def used_up() -> Iterator[Tensor]:
    batches = iter([inputs()])
    list(batches)
    return batches


NONE: dict[str, Callable[[], Any]] = {
    "an empty list": list,
    "no rows": lambda: torch.zeros(0, 4),
    "batches of no rows": lambda: [torch.zeros(0, 4), torch.zeros(0, 4)],
    "a dict of no rows": lambda: {"x": torch.zeros(0, 4)},
    "used up": used_up,
}


@pytest.mark.parametrize("known", NONE.values(), ids=NONE)
def test_no_inputs_are_refused(model: nn.Module, known: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="known has no inputs, or they were used up"):
        syngap.protect(model, known())


@pytest.mark.parametrize("known", ["text", b"bytes", 5, None])
def test_what_is_no_inputs_is_refused(model: nn.Module, known: Any) -> None:
    with pytest.raises(TypeError, match="known must be a tensor, a dict of tensors or batches"):
        syngap.protect(model, known)


def test_a_tensor_without_a_batch_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="must have a batch dimension"):
        syngap.protect(model, torch.tensor(1.0))


def test_a_generator_is_used_once_and_an_empty_batch_counts_for_nothing(model: nn.Module) -> None:
    batches = list(torch.split(inputs(), 8))
    plain = syngap.protect(model, batches)
    once = syngap.protect(model, iter([batches[0], torch.zeros(0, 4), *batches[1:]]))
    for _ in range(12):
        assert torch.equal(plain.loss(), once.loss())
    for param, known in plain.known.items():
        assert torch.equal(known.importance, once.known[param].importance)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("act", [syngap.protect, plan_memory], ids=["protect", "plan"])
def test_reading_known_inputs_moves_no_random_numbers(
    model: nn.Module, act: Callable[..., Any], shuffle: bool
) -> None:
    act(model, DataLoader(list(inputs()), batch_size=8, shuffle=shuffle))
    act(model, (torch.randn(8, 4) for _ in range(5)))


def test_a_default_device_of_torch_elsewhere_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where `torch.set_default_device` names a GPU, and the model is on the CPU."""
    monkeypatch.setattr(knowledge, "_ENOUGH", 64)
    monkeypatch.setattr(knowledge, "_SAMPLES", 16)
    known, many = inputs(), list(torch.randn(20, 32, 6).unbind())
    table, ends, texts = nn.Embedding(20, 6), [], []
    for device in ("cpu", "meta"):
        model, linear = classifier().eval(), copy.deepcopy(classifier().head)
        larger = classifier(classes=4).head
        base = SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, old = inputs(8), model.head
        writer = nn.Sequential(table, linear)
        with torch.no_grad():
            larger.weight[:3], larger.bias[:3] = old.weight, old.bias
        with torch.device(device):
            protection = syngap.protect(model, known, rotate=True, rank="full", every=1)
            optimizer = protection.optimizer(base)
            for _ in range(3):
                (protection.loss() + model(x).logsumexp(1).mean()).backward()
                optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model.head = larger
            protection.grow(old.weight, larger.weight)
            protection.grow(old.bias, larger.bias)
            protection.interpolate(0.5)
            ends.append((values_of(model), protection.loss(), protection.report().kl))
            syngap.protect(linear, many)  # of which some are enough
            plan_memory(model, known)
            firsts: list[dict[str, Any]] = [{"start": 0}, {"prompts": [[1, 2]]}]
            texts += [syngap.own_samples(writer, 4, length=5, **first) for first in firsts]
    assert_identical(*ends)
    assert_identical(texts[:2], texts[2:])


class Two(nn.Module):
    """A model that takes a second argument, which does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(x if x.is_floating_point() else self.tokens(x))
        return out


TEXTS = torch.arange(240).view(40, 6) % 7
LABELS: dict[str, tuple[Tensor, Tensor]] = {
    "classes": (inputs(), torch.arange(40)),
    "a column": (inputs(), torch.zeros(40, 1)),
    "real numbers": (inputs(), torch.linspace(0, 1, 40)),
    "classes of texts": (TEXTS, torch.arange(40)),
    "next tokens": (TEXTS[:, :-1], TEXTS[:, 1:]),
    "the tokens, some ignored": (TEXTS, TEXTS.masked_fill(TEXTS == 3, -100)),
    "classes of places": (inputs().view(10, 4, 4), torch.zeros(10, 4, dtype=torch.long)),
}
INPUTS: dict[str, tuple[Tensor, Tensor]] = {
    "a mask": (TEXTS, torch.ones_like(TEXTS)),
    "other texts": (TEXTS, TEXTS.flip(1)),
    "real numbers beside real numbers": (inputs(), inputs()),
    "tokens beside tokens": (TEXTS, TEXTS[:, :2]),
    "one token each": (TEXTS[:, :1], TEXTS[:, 1:2]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_never_taken_for_inputs_in_silence(kind: str) -> None:
    x, y = LABELS[kind]
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    one = nn.Sequential(Two())
    with pytest.raises(TypeError, match=r"than Sequential takes: .*pass \[x for x, y in known\]"):
        syngap.protect(one, loader)
    with pytest.warns(
        UserWarning, match=r"looks like labels.*pass \[x for x, y in known\]"
    ) as said:
        syngap.protect(Two(), loader)
    assert len(said) == 1
    assert said[0].filename == __file__
    both: list[Any] = [(x, y)] if x.shape == y.shape else [(x, y), [x, y]]
    for known in both:
        with pytest.raises(TypeError, match=r"^pass known\[0\]"):
            syngap.protect(one, known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syngap.protect(one, [x for x, y in loader])
        syngap.protect(one, loader, predict=lambda batch: one(batch[0]))
        syngap.protect(Two(), [{"x": x, "more": y} for x, y in loader])


@pytest.mark.parametrize("kind", INPUTS)
def test_a_second_input_is_not_taken_for_labels(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syngap.protect(Two(), [INPUTS[kind]])
        syngap.protect(Two(), [INPUTS[kind][0]] * 2)


def test_more_parts_than_the_model_takes_are_explained(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"pass \[batch\[0\] for batch in known\]"):
        syngap.protect(model, [(inputs(), torch.zeros(40), torch.arange(40))])


def test_fewer_parts_than_the_model_takes_are_not_said_to_be_labels() -> None:
    bilinear = nn.Bilinear(4, 4, 3)
    syngap.protect(bilinear, [(inputs(), inputs())])
    with pytest.raises(TypeError, match=r"known inputs: .*missing 1 required .*'input2'"):
        syngap.protect(bilinear, inputs())
    with pytest.raises(TypeError, match=r"known inputs: .*takes 3 positional"):
        syngap.protect(bilinear, [(inputs(), inputs(), inputs())])


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Tensor:
        return inputs()[place]


MENDED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "an array": (inputs().numpy(), r"torch\.from_numpy\(known\)", torch.from_numpy),
    "arrays": (
        [inputs().numpy()],
        r"torch\.from_numpy",
        lambda known: [torch.from_numpy(known[0])],
    ),
    "lists of numbers": (inputs().tolist(), "tensors in place of lists", torch.tensor),
    "a dict of lists": (
        {"x": inputs().tolist()},
        'return_tensors="pt"',
        lambda known: {"x": torch.tensor(known["x"])},
    ),
    "a data set": (Samples(), r"DataLoader\(known, batch_size=16\)", lambda d: DataLoader(d, 16)),
    "a data set with labels": (
        TensorDataset(inputs(), torch.arange(40)),
        r"\[x for x, y in DataLoader\(known, batch_size=16\)\]",
        lambda known: [x for x, y in DataLoader(known, batch_size=16)],
    ),
    "one sample": (inputs()[0], r"pass known\[None\]", lambda known: known[None]),
    "a list of samples": (list(inputs()), r"torch\.stack\(known\)", torch.stack),
}


@pytest.mark.filterwarnings("ignore:known inputs gave 1 row")
@pytest.mark.parametrize("kind", MENDED)
def test_inputs_of_another_kind_are_answered_with_what_to_pass(kind: str) -> None:
    """And that is taken."""
    known, message, mend = MENDED[kind]
    for gate in (True, False):
        model = classifier()
        with pytest.raises((TypeError, ValueError), match=message):
            syngap.protect(model, known, gate=gate)
        syngap.protect(model, mend(known), gate=gate)


TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("own", TYPES[:3], ids=str)
@pytest.mark.parametrize("theirs", [*TYPES, torch.int64], ids=str)
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_inputs_of_another_precision_are_answered_with_the_models(
    own: torch.dtype, theirs: torch.dtype, layer: str
) -> None:
    convolution = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3))
    model = (nn.Sequential(nn.Linear(4, 3)) if layer == "linear" else convolution).to(own)
    known = (8 * inputs()).to(theirs)
    known = known if layer == "linear" else known.unsqueeze(1)
    if own != theirs:
        with pytest.raises(RuntimeError, match=rf"Known has {theirs}.*by \.to\({own}\)"):
            syngap.protect(model, known)
    syngap.protect(model, known.to(own))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 1)], ids=type)
def test_a_model_that_was_converted_after_protect_is_named_and_not_its_inputs(
    layer: nn.Module, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(layer)
    known = inputs() if isinstance(layer, nn.Linear) else inputs().unsqueeze(-1)
    shift = torch.zeros(3, 1)

    def predict(x: Tensor) -> Tensor:
        return (model(x).view(-1, 3, 1) + shift).squeeze(-1)

    protection = syngap.protect(model, known, predict=predict, every=1)
    for change, was in ((dtype, r"dtype was torch\.float32"), ("meta", "device was cpu")):
        model.to(change)
        for call in (protection.loss, protection.report):
            message = rf"model's {was} at protect\(\), and is {change} now: change it back"
            with pytest.raises(RuntimeError, match=message) as caught:
                call()
            assert "Known has" not in str(caught.value)
        model.to_empty(device="cpu").to(torch.float32)
    protection.report()


def test_tokens_that_are_no_whole_numbers_are_explained() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match=r"Tokens are whole numbers.*by \.long\(\)"):
        syngap.protect(model, TEXTS.float())
    syngap.protect(model, TEXTS.float().long())


def test_too_few_inputs_are_said_once_with_the_worst_layer() -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match=r"gave 6 rows .* to 0\.weight, which has 20") as caught:
        syngap.protect(model, torch.randn(6, 20))
    assert len(caught) == 1
    assert "1 more" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syngap.protect(model, torch.randn(20, 20))
        syngap.protect(model, torch.randn(6, 20), gate=False)


def test_places_of_images_are_rows() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 4 * 4, 3))
    with pytest.warns(UserWarning, match=r"gave 5 rows .* to 2\.weight, which has 48 inputs:"):
        syngap.protect(model, torch.randn(5, 2, 6, 6))  # 80 places, of 18 inputs


@pytest.mark.parametrize(
    ("number", "gate"), [(torch.nan, True), (torch.nan, False), (torch.inf, True)]
)
def test_inputs_that_are_not_finite_are_refused_by_that_name(
    model: Classifier, number: float, gate: bool
) -> None:
    known = inputs()
    known[20, 2] = number
    with pytest.raises(NotFiniteError, match=r"^known inputs have 1 NaN or infinite among \d+ num"):
        syngap.protect(model, known, gate=gate)
    with pytest.raises(ValueError, match=r"[Kk]nown inputs have 1 NaN or infinite among \d+ num"):
        syngap.protect(model, known, gate=gate, predict=lambda x: Normal(model(x), 1.0))
    lost = copy.deepcopy(model)
    lost.head.weight.data.fill_(number)
    with pytest.raises(NotFiniteError, match=r"^(?!.*known inputs have).*finite"):
        syngap.protect(lost, inputs(), gate=gate)


class Shrunk(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.factor
        return out


def test_activations_that_overflow_inside_are_refused_by_their_layer() -> None:
    model = Shrunk(1e-25)  # predictions are finite, and squares of what goes in are not
    before = everything(model)
    with pytest.raises(ValueError, match=r"through layer\.weight.*not finite"):
        syngap.protect(model, inputs() * 1e25)
    assert_identical(everything(model), before)


class Overflowing(nn.Module):
    """Its scale is no factor of a product, and its gradient overflows when it is squared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(x) + 1e25 * (self.scale - self.scale.detach()))
        return out


def test_an_importance_that_overflows_is_refused_by_its_parameter() -> None:
    with pytest.raises(NotFiniteError, match="importance of scale is not finite"):
        syngap.protect(Overflowing(), inputs())


# Models -------------------------------------------------------------------------------------------


def test_a_model_without_parameters_is_refused() -> None:
    for gate in (True, False):
        with pytest.raises(ValueError, match="Softmax has no parameters"):
            syngap.protect(nn.Softmax(-1), inputs(), gate=gate)


@pytest.mark.parametrize("called", ["protect", "plan_memory", "own_samples"])
def test_what_is_no_model_is_refused_by_the_name_of_what_was_called(called: str) -> None:
    function, arguments = CALLS[called]
    for model, hint in (("gpt2", r"from_pretrained\('gpt2'\)"), (nn.Linear, "pass the model")):
        kind = type(model).__name__
        message = rf"^{called}\(\) takes a torch\.nn\.Module, got {kind}: .*{hint}"
        with pytest.raises(TypeError, match=message):
            function(*arguments(model))


def test_a_frozen_model_is_refused_by_the_gate() -> None:
    model = classifier().requires_grad_(False)
    before = everything(model)
    with pytest.raises(ValueError, match=r"is frozen.*requires_grad_\(True\).*get_peft_model"):
        syngap.protect(model, inputs())
    assert_identical(everything(model), before)
    assert not syngap.protect(model, inputs(), gate=False).loss().requires_grad


def test_layers_frozen_or_unfrozen_afterwards_are_reported_as_what_they_are() -> None:
    model = classifier()
    model.first.requires_grad_(False)
    protection = syngap.protect(model, inputs())
    model.first.requires_grad_(True)
    model.head.requires_grad_(False)
    how = {one.name: one.how for one in protection.report().coverage}
    assert how["first.weight"] == "new"
    assert how["head.weight"] == "frozen"
    assert how["norm.weight"] == "entries"


def test_gradients_that_vanish_in_half_precision_are_refused() -> None:
    """In float32 the same model has a small importance."""
    model = Shrunk(2.0**-40).to(torch.float16)
    with pytest.raises(ValueError, match=r"importance of every parameter is zero.*in float32"):
        syngap.protect(model, inputs().half())
    syngap.protect(Shrunk(2.0**-40), inputs())
    with pytest.raises(ValueError, match="do not depend on the parameters, or are certain"):
        syngap.protect(Shrunk(0.0), inputs())


def test_a_step_of_float16_weights_that_overflows_says_how_to_train() -> None:
    model = nn.Linear(4, 3)
    for dtype, advice in {
        torch.float16: r"load.*float32.*autocast",
        torch.float32: "smaller lr",
    }.items():
        protection = syngap.protect(model.to(dtype), inputs().to(dtype))
        optimizer = protection.optimizer(AdamW(model.parameters(), lr=0.01))
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.inf)
        with pytest.raises(NotFiniteError, match=advice):
            optimizer.step()


@pytest.mark.parametrize("options", [{"rank": "full"}, {"rank": 2}, {"rotate": False}])
@pytest.mark.parametrize("base", [AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_a_step_that_spoils_float16_weights_leaves_them_as_they_were(
    base: Any, options: dict[str, Any]
) -> None:
    """The second moment of a small gradient is 0 in float16, and so is an eps of 1e-8."""
    model = nn.Linear(4, 3).half()
    protection = syngap.protect(model, inputs().half(), **options)
    optimizer = protection.optimizer(base(model.parameters(), lr=0.01))
    before = copy.deepcopy(values_of(model))
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-5)
    with pytest.raises(NotFiniteError, match=r"they are again what they were.*float32.*autocast"):
        optimizer.step()
    assert_identical(values_of(model), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", ["full", 2])
def test_weights_in_half_precision_are_protected_saved_and_loaded(
    dtype: torch.dtype, rank: Any
) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(number)
                param.copy_(torch.randn(param.shape, generator=generator))
        protection = syngap.protect(model, inputs().to(dtype), rank=rank)
        # An eps of 1e-8 is 0 in float16.
        return model, protection.optimizer(AdamW(model.parameters(), lr=0.01, eps=1e-4))

    model, optimizer = make()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    assert all(entry["importance"].dtype == torch.float32 for entry in state["state"].values())
    again = make()[1]
    again.load_state_dict(copy.deepcopy(state))
    assert_identical(again.state_dict(), state)


class Branched(nn.Module):
    """Only one of two layers is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, idle: bool = False) -> Tensor:
        out: Tensor = self.idle(x) if idle else self.used(x)
        return out


def test_a_layer_that_known_inputs_do_not_reach_is_free_and_reported() -> None:
    model = Branched()
    protection = syngap.protect(model, inputs())
    how = {one.name: one.how for one in protection.report().coverage}
    assert how["idle.weight"] == how["idle.bias"] == "new"
    assert how["used.weight"] == "directions"
    optimizer = protection.optimizer(SGD(model.parameters(), lr=1.0))
    before = values_of(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    after = values_of(model)
    assert torch.allclose(before["idle.weight"] - after["idle.weight"], torch.tensor(1.01))
    assert (before["used.bias"] - after["used.bias"]).abs().max() < 0.9


def test_a_layer_whose_inputs_are_always_zero_is_free_and_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.init.constant_(model[0].bias, -100.0)  # dead
    protection = syngap.protect(model, inputs())
    how = {one.name: one.how for one in protection.report().coverage}
    assert how["2.weight"] == how["0.weight"] == "new"
    assert how["2.bias"] == "entries"


def test_a_wrapper_for_several_processes_is_looked_through(tmp_path: Any) -> None:
    model = classifier().eval()
    expected = syngap.protect(model, inputs())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(model)
        protection = syngap.protect(wrapper, inputs())
        assert protection.model is model
        optimizer = protection.optimizer(AdamW(wrapper.parameters(), lr=0.01))
        loss = wrapper(inputs()).logsumexp(1).mean() + protection.loss()
        loss.backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    for param, known in expected.known.items():
        assert torch.equal(protection.known[param].importance, known.importance)
    parallel = syngap.protect(nn.DataParallel(model), inputs())
    assert parallel.model is model


def test_a_pass_that_fails_half_way_leaves_nothing_behind(model: Classifier) -> None:
    for at in range(8):
        calls = iter(range(100))

        def predict(batch: Tensor, calls: Iterator[int] = calls, at: int = at) -> Tensor:
            if next(calls) == at:
                raise RuntimeError("out of memory")
            return model(batch)  # type: ignore[no-any-return]

        with pytest.raises(RuntimeError, match="out of memory"):
            syngap.protect(model, inputs(), predict=predict)


class Writing(nn.Module):
    """A classifier whose forward pass changes something of it, in eval mode too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.length, self.merged = how, 0, False
        self.table: Tensor | None = None
        self.body, self.lookup = classifier(), nn.Embedding(5, 4, max_norm=0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("empty", None)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        if how == "an expanded buffer is written":
            self.register_buffer("expanded", torch.zeros(1, 3).expand(4, 3))

    def train(self, mode: bool = True) -> Writing:
        if self.how == "weights are merged by eval()" and not mode:
            self.merged = True
            self.body.first.weight.data.add_(1.0)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.body.norm
        if self.how == "a buffer is written":
            self.calls += 1
        elif self.how == "a buffer is exchanged":
            self.calls = self.calls + 1
        elif self.how == "a buffer is filled":
            self.empty = torch.ones(3)
        elif self.how == "a buffer is added" and self.length < 4:
            self.register_buffer("cache", torch.ones(4))
            self.length = 4
        elif self.how == "a buffer is deleted" and hasattr(self, "passing"):
            del self.calls, self.passing
        elif self.how == "a buffer is enlarged":
            self.calls.data = torch.ones(5, dtype=torch.long)
        elif self.how == "an expanded buffer is written":
            self.expanded[:1] += 1
        elif self.how == "an attribute is added":
            self.last = x.shape
        elif self.how == "a table is kept":
            self.table = torch.linspace(0, 1, 4) if self.table is None else self.table
            x = x + self.table
        elif self.how == "statistics are of each batch":
            F.batch_norm(x, norm.running_mean[:4], norm.running_var[:4], training=True)
        elif self.how == "a layer trains":
            norm.train()
        elif self.how == "random numbers are drawn":
            x = F.dropout(x, 0.1)
        elif self.how == "an embedding is renormalised":
            x = x + self.lookup(torch.zeros(len(x), dtype=torch.long))
        return self.body(x)  # type: ignore[no-any-return]


def writing(how: str) -> Writing:
    """Return a model in a mode, with gradients, that a pass must leave alone."""
    model = Writing(how).train()
    model.body.dropout.eval()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


def traces(model: Writing) -> Any:
    """Copies and identities of all that a pass may change."""
    return [
        everything(model),
        [[(name, id(each)) for name, each in m._buffers.items()] for m in model.modules()],
        [each.data_ptr() for each in model.buffers()],
        list(model.state_dict()),
        [set(vars(m)) for m in model.modules()],
        [model.length, model.merged, model.table],
    ]


CHANGES = [
    "nothing",
    "a buffer is written",
    "a buffer is exchanged",
    "a buffer is filled",
    "a buffer is added",
    "a buffer is deleted",
    "a buffer is enlarged",
    "an expanded buffer is written",
    "an attribute is added",
    "a table is kept",
    "statistics are of each batch",
    "a layer trains",
    "random numbers are drawn",
    "an embedding is renormalised",
    "weights are merged by eval()",
]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_no_pass_of_the_set_up_leaves_a_trace(how: str, teacher: bool, gate: bool) -> None:
    """Not the gate's, the teacher's, nor the trial of a model without a gate."""
    model = writing(how)
    before = traces(model)
    syngap.protect(model, inputs(), gate=gate, teacher=teacher)
    assert_identical(traces(model), before)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_no_pass_of_a_report_leaves_a_trace(
    how: str, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stored:  # a report then runs the model with its first weights too
        monkeypatch.setattr("syngap.protection.teacher.byte_limit", lambda model: 0)
    model = writing(how)
    protection = syngap.protect(model, inputs(), gate=False)
    before = traces(model)
    protection.report()
    assert_identical(traces(model), before)


@pytest.mark.parametrize("how", CHANGES)
def test_no_pass_of_a_plan_leaves_a_trace(how: str) -> None:
    model = writing(how)
    before = traces(model)
    plan_memory(model, inputs())
    assert_identical(traces(model), before)
    syngap.protect(model, inputs())


def test_a_pass_that_fails_after_it_has_deleted_a_buffer_raises_its_own_error() -> None:
    model = writing("a buffer is deleted")
    model.body.head.register_forward_hook(lambda *of: F.relu("out of memory"))
    before = traces(model)
    with pytest.raises(TypeError, match="relu"):
        syngap.protect(model, inputs())
    assert_identical(traces(model), before)


def test_a_report_that_fails_has_put_everything_back() -> None:
    """Before its error is caught: who keeps that keeps the frames of the passes."""
    model = writing("a buffer is written")
    protection = syngap.protect(model, inputs(), gate=False)
    model.register_forward_hook(lambda *of: of[-1][:, :2])
    before = traces(model)
    with pytest.raises(ValueError, match="before") as held:
        protection.report()
    assert held.value.__traceback__ is not None
    assert_identical(traces(model), before)


def test_a_loss_made_before_a_report_has_a_backward_pass() -> None:
    """Its graph holds statistics, which would have a new version after `copy_`."""
    model = classifier()
    protection = syngap.protect(model, inputs(), gate=False)
    loss = model.eval()(inputs()).sum()
    protection.report()
    loss.backward()


def test_buffers_of_any_kind_are_left_alone() -> None:
    model = classifier()
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("quantised", torch.ones(2).to(torch.float8_e4m3fn))
    syngap.protect(model, inputs(), gate=False).report()
    for found in (model.inferred, model.quantised.float()):
        assert torch.equal(found, torch.ones(2))
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


def test_a_plan_of_a_model_on_the_meta_device_has_buffers_without_numbers() -> None:
    with torch.device("meta"):
        model = Classifier()
    assert plan_memory(model, inputs()).answers == plan_memory(classifier(), inputs()).answers


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_left_as_it_was() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return F.linear(x, self.weight, self.bias)

    model = torch.jit.script(Counting())
    syngap.protect(model, inputs(), gate=False)
    assert model.calls == 0
    assert model.training


# Predictions --------------------------------------------------------------------------------------

NO_PREDICTION: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "a tuple": (lambda logits: (logits, logits), TypeError, "Distribution, got tuple"),
    "a text": (lambda logits: "yes", TypeError, "Distribution, got str"),
    "classes": (lambda logits: logits.argmax(-1), ValueError, "logits .*got torch.int64"),
    "one class": (lambda logits: logits[:, :1], ValueError, "logits"),
    "no batch": (lambda logits: logits[0], ValueError, r"logits .*\(3,\)"),
    "nan": (lambda logits: logits * torch.nan, NotFiniteError, "finite"),
    "a distribution of nan": (
        lambda logits: Normal(logits * torch.nan, 1.0, validate_args=False),
        NotFiniteError,
        "NaN|finite",
    ),
}


@pytest.mark.parametrize("kind", NO_PREDICTION)
@pytest.mark.parametrize("gate", [True, False])
def test_what_is_no_prediction_is_refused(model: Classifier, kind: str, gate: bool) -> None:
    change, error, message = NO_PREDICTION[kind]
    with pytest.raises(error, match=message):
        syngap.protect(model, inputs(), gate=gate, predict=lambda x: change(model(x)))


DISTRIBUTIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda logits: Normal(logits, 0.5),
    "bernoulli": lambda logits: Bernoulli(logits=logits),
    "categorical": lambda logits: Categorical(logits=logits),
}


OF_ANOTHER: dict[str, Callable[[nn.Module, nn.Module], Callable[[Tensor], Any]]] = {
    "a copy": lambda model, other: other,
    "a frozen copy": lambda model, other: other.requires_grad_(False),
    "detached": lambda model, other: lambda x: model(x).detach(),
    "a distribution": lambda model, other: lambda x: Categorical(logits=other(x)),
    "a copy, later": lambda model, other: model,
}


@pytest.mark.parametrize("kind", OF_ANOTHER)
@pytest.mark.parametrize("gate", [True, False])
def test_a_prediction_of_another_model_is_refused(kind: str, gate: bool) -> None:
    """Else the report would compare that one with itself, and say that all is kept."""
    model, other = classifier(), classifier()
    predicts = [OF_ANOTHER[kind](model, other)]

    def protected() -> Tensor:
        protection = syngap.protect(model, inputs(), predict=lambda x: predicts[0](x), gate=gate)
        predicts[0] = OF_ANOTHER[kind](other, other)
        return protection.loss()

    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        protected()


@pytest.mark.parametrize("gate", [True, False])
def test_a_model_of_another_prediction_is_noticed_whatever_hooks_it_has(gate: bool) -> None:
    model, other = classifier(), classifier()
    chosen = [model]
    protection = syngap.protect(model, inputs(), predict=lambda x: chosen[0](x), gate=gate)
    for param in (*model.parameters(), *other.parameters()):
        param.register_hook(lambda grad: grad)
    chosen[0] = other
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        protection.loss()


@pytest.mark.parametrize("before", [True, False])
def test_a_new_head_may_learn_alone_while_the_teacher_asks_the_old_one(before: bool) -> None:
    model, head = classifier(), nn.Linear(6, 2)
    model.add_module("new", head)
    learns = dict.fromkeys(model.parameters(), False) | dict.fromkeys(head.parameters(), True)
    if before:
        for param, may in learns.items():
            param.requires_grad_(may)
    protection = syngap.protect(model, inputs(), gate=not before)
    for param, may in learns.items():
        param.requires_grad_(may)
    assert protection.loss() == 0


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_a_distribution_is_a_prediction(kind: str) -> None:
    model = classifier()
    protection = syngap.protect(
        model, inputs(), predict=lambda x: DISTRIBUTIONS[kind](model(x)), anchors=40
    )
    assert float(protection.loss().detach()) == pytest.approx(0, abs=1e-6)
    optimizer = protection.optimizer(AdamW(model.parameters(), lr=0.1))
    model(inputs()).square().mean().backward()
    optimizer.step()
    loss = protection.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    report = protection.report()
    assert 0 < report.kl == pytest.approx(float(loss.detach()), rel=1e-4)
    assert report.agreement is None


CHANGES: dict[
    str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], type[Exception], str]
] = {
    "more classes": (
        lambda y: y,
        lambda y: torch.cat([y, y], -1),
        ValueError,
        r"\(\d+, 6\).*before .*\(\d+, 3\).*grow",
    ),
    "fewer classes": (
        lambda y: y,
        lambda y: y[:, :2],
        ValueError,
        r"\(\d+, 2\).*before .*\(\d+, 3\)",
    ),
    "fewer rows": (lambda y: y, lambda y: y[:5], ValueError, r"\(5, 3\).*before .*\(\d+, 3\)"),
    "another dimension": (lambda y: y, lambda y: y[None], ValueError, r"\(1, \d+, 3\).*\d+, 3\)"),
    "a distribution now": (lambda y: y, lambda y: Normal(y, 1.0), TypeError, "gave logits before"),
    "logits now": (lambda y: Normal(y, 1.0), lambda y: y, TypeError, "a distribution before"),
    "a tuple now": (lambda y: y, lambda y: (y,), TypeError, "with tuple now"),
    "fewer of a distribution": (
        lambda y: Normal(y, 1.0),
        lambda y: Normal(y[:, :2], 1.0),
        ValueError,
        r"Normal \(batch \(\d+, 2\).*before with Normal \(batch \(\d+, 3\)",
    ),
    "more classes of a distribution": (
        lambda y: Categorical(logits=y),
        lambda y: Categorical(logits=torch.cat([y, y], -1)),
        ValueError,
        r"6 classes.*before .*3 classes",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_answers_of_another_shape_than_before_are_refused_by_both(kind: str) -> None:
    """Such as those of a model with another tokenizer, or another head."""
    before, now, error, message = CHANGES[kind]
    model, is_after = classifier(), False

    def predict(x: Tensor) -> Any:
        return (now if is_after else before)(model(x))

    protection = syngap.protect(model, inputs(), predict=predict)
    is_after = True
    for act in (protection.loss, protection.report):
        with pytest.raises(error, match=message):
            act()


# Models that changed, and optimizers --------------------------------------------------------------


def test_a_head_replaced_without_grow_is_free_and_reported() -> None:
    model = classifier()
    protection = syngap.protect(model, inputs())
    model.head = nn.Linear(6, 3)
    optimizer = protection.optimizer(AdamW(model.parameters(), lr=0.01))
    model(inputs()).logsumexp(1).mean().backward()
    optimizer.step()
    how = {one.name: one.how for one in protection.report().coverage}
    assert how["head.weight"] == how["head.bias"] == "new"
    assert how["first.weight"] == "directions"
    assert "new or without importance, so not protected (2 tensors)" in str(protection.report())
    model.head = nn.Linear(6, 5)
    with pytest.raises(ValueError, match=r"\(\d+, 5\).*before .*\(\d+, 3\)"):
        protection.report()
    before = values_of(model)
    with pytest.raises(ValueError, match=r"other parameters than at protect.*head.*grow"):
        protection.interpolate(0.5)
    assert_identical(values_of(model), before)


def test_an_optimizer_of_a_head_that_the_model_no_longer_has_is_refused() -> None:
    model = classifier()
    base = AdamW(model.parameters(), lr=0.01)
    protection = syngap.protect(model, inputs())
    model.head = nn.Linear(6, 3)
    groups = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=r"shape \(3, 6\) that the model no longer has.*anew"):
        protection.optimizer(base)
    assert_identical(base.state_dict(), groups)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_model_without_a_layer_that_is_recognised_is_protected_entry_by_entry(
    batches: int,
) -> None:
    model = nn.LSTM(4, 3, batch_first=True)
    known = torch.randn(16 * batches, 5, 4, generator=torch.Generator().manual_seed(0))
    protection = syngap.protect(model, known, predict=lambda x: model(x)[0])
    assert {each.how for each in protection.report().coverage} == {"entries"}
    assert all(float(one.importance.max()) > 0 for one in protection.known.values())


def test_an_optimizer_of_no_known_parameter_is_refused(model: Classifier) -> None:
    protection = syngap.protect(model, inputs())
    with pytest.raises(ValueError, match="holds no parameter that protect"):
        protection.optimizer(AdamW(classifier().parameters()))


def test_parameters_of_a_loss_are_free() -> None:
    model, outside = classifier(), nn.Linear(3, 2)
    protection = syngap.protect(model, inputs())
    base = SGD([*model.parameters(), *outside.parameters()], lr=1.0)
    optimizer = protection.optimizer(base)
    before = values_of(outside)
    outside(model(inputs())).sum().backward()
    expected = before["weight"] - 1.01 * outside.weight.grad  # type: ignore[operator]
    optimizer.step()
    assert torch.allclose(outside.weight, expected)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_an_optimizer_made_before_protect_is_as_good() -> None:
    ends = []
    for early in (True, False):
        model = classifier()
        base = AdamW(model.parameters(), lr=0.01) if early else None
        protection = syngap.protect(model, inputs())
        optimizer = protection.optimizer(base or AdamW(model.parameters(), lr=0.01))
        (model.eval()(inputs()).logsumexp(1).mean() + protection.loss()).backward()
        optimizer.step()
        ends.append(values_of(model))
    assert_identical(*ends)


def test_an_optimizer_that_is_behind_a_gate_is_refused(model: Classifier) -> None:
    protection = syngap.protect(model, inputs())
    base = AdamW(model.parameters())
    optimizer = protection.optimizer(base)
    assert isinstance(optimizer, WrappedSynGAP)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="gated already"):
        protection.optimizer(optimizer)
    with pytest.raises(ValueError, match="behind a gate already"):
        protection.optimizer(base)
    with pytest.raises(ValueError, match="gated already"):
        protection.optimizer(syngap.SynGAP(model.parameters(), lr=0.1))
    assert_identical(optimizer.state_dict(), before)


class ScheduleFree(SGD):
    """Has what schedule-free optimizers have, whose weights are others in training."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("kind", [LBFGS, SparseAdam, ScheduleFree])
def test_optimizers_that_cannot_be_gated_are_refused(model: Classifier, kind: Any) -> None:
    protection = syngap.protect(model, inputs())
    base = kind(model.parameters())
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be behind a gate"):
        protection.optimizer(base)
    assert_identical(base.state_dict(), before)
    assert protection.loss() >= 0


@pytest.mark.parametrize("gate", [True, False])
def test_what_is_no_optimizer_is_refused(model: Classifier, gate: bool) -> None:
    protection = syngap.protect(model, inputs(), gate=gate)
    for base in (AdamW, None, model):
        with pytest.raises(TypeError, match=r"takes an optimizer that holds parameters"):
            protection.optimizer(base)  # type: ignore[arg-type]


def test_rotating_needs_complete_bases(model: Classifier) -> None:
    protection = syngap.protect(model, inputs(), rank=2, rotate=True)
    with pytest.raises(ValueError, match="rotate=True needs complete bases"):
        protection.optimizer(AdamW(model.parameters()))


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    for rotate in (True, False):
        model = classifier()
        protection = syngap.protect(model, inputs(), rank="full", rotate=rotate)
        optimizer = protection.optimizer(AdamW(model.parameters(), lr=0.01))
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        before, state = values_of(model), copy.deepcopy(optimizer.state_dict())
        with pytest.raises(NotFiniteError, match="nothing has moved"):
            optimizer.step()
        assert_identical(values_of(model), before)
        assert_identical(optimizer.state_dict(), state)


# Classes that are not in the last dimension -------------------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"gate": False}, {"teacher": False}], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (6, 5)])
def test_classes_in_dimension_1_are_refused_with_what_to_pass(
    parts: dict[str, bool], shape: tuple[int, int]
) -> None:
    """As a network that labels every pixel gives them."""
    model, images = nn.Conv2d(3, 4, 1), torch.randn(32, 3, *shape)
    with pytest.raises(ValueError, match=r"movedim\(1, -1\), to protect\(\) by predict="):
        syngap.protect(model, images, **parts)
    protection = syngap.protect(
        model, images, predict=lambda x: model(x).movedim(1, -1).flatten(0, -2), **parts
    )
    assert protection.report().loss_before < 1.5  # of four classes, not of as many as columns


class TwoOutputs(nn.Module):
    """Returns its loss first where it gets labels, and its state last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = self.layer(x)
        return (logits.sum(), logits) if labels is not None else (logits, x)


@pytest.mark.parametrize("parts", [{}, {"gate": False}], ids=str)
def test_a_model_that_returns_several_things_is_refused_with_what_to_pass(
    parts: dict[str, bool],
) -> None:
    for known, place in ((inputs(), 0), ({"x": inputs(), "labels": torch.zeros(len(inputs()))}, 1)):
        hint = rf"model\(batch\)\[{place}\], and inputs without labels"
        with pytest.raises(TypeError, match=hint):
            syngap.protect(TwoOutputs(), known, **parts)


def test_a_protection_names_its_parts() -> None:
    model = nn.Linear(4, 3)
    found = [repr(syngap.protect(model, inputs(), **parts)) for parts in ({}, {"gate": False})]
    assert found[0] == "<Protection of Linear by gate and teacher; see report()>"
    assert found[1] == "<Protection of Linear by teacher; see report()>"
    neither = syngap.protect(model, inputs(), gate=False, teacher=False)
    assert repr(neither) == "<Protection of Linear by interpolation alone; see report()>"


def raised_by(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def test_errors_name_what_a_user_of_protect_has_called() -> None:
    """And not `SynGAP`, whose options and calls are no part of the loop."""
    model = classifier()
    protection = syngap.protect(model, inputs())
    optimizer = protection.optimizer(AdamW(model.parameters(), lr=0.01))
    others = syngap.protect(model, inputs()).optimizer(SGD(model.parameters(), lr=0.01))
    bare, saved = AdamW(model.parameters()).state_dict(), others.state_dict()
    other = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    messages = {
        "0.01, try 0.001.*catch this error and go on": raised_by(optimizer.step),
        r"without a gate.*before protection\.optimizer\(base\)": raised_by(
            lambda: optimizer.load_state_dict(bare)
        ),
        r"protection\.optimizer\(SGD\), and.*protection\.optimizer\(AdamW\)": raised_by(
            lambda: optimizer.load_state_dict(saved)
        ),
        "takes real parameters": raised_by(
            lambda: protection.optimizer(SGD([*model.parameters(), other]))
        ),
        "LBFGS cannot be behind a gate": raised_by(
            lambda: protection.optimizer(LBFGS(model.parameters()))
        ),
        "must use this model": raised_by(
            lambda: syngap.protect(model, inputs(), predict=lambda x: model(x).detach())
        ),
    }
    for expected, message in messages.items():
        assert re.search(expected, message), message
        assert not re.search("SynGAP|observe", message), message
    model.zero_grad()
    optimizer.step()  # as the advice says


def test_a_divergence_that_rounding_leaves_below_zero_is_reported_as_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protection = syngap.protect(classifier(), inputs())
    monkeypatch.setattr("syngap.protection.report.divergence", lambda *_: torch.tensor(-1e-7))
    report = protection.report()
    assert report.kl == 0
    assert "-0.0000" not in str(report)


@pytest.mark.parametrize(
    ("value", "kl", "sentence"),
    [
        (torch.nan, torch.nan, "The model answers known inputs with NaN: what it knew is lost."),
        (torch.inf, torch.nan, "The model answers known inputs with NaN: what it knew is lost."),
        (-torch.inf, torch.inf, "The model rules out what it answered before: an infinite KL."),
    ],
)
def test_a_report_never_hides_what_is_not_finite(value: float, kl: float, sentence: str) -> None:
    model = classifier()
    protection = syngap.protect(model, inputs(), gate=False)
    with torch.no_grad():
        model.head.bias[2] = value
    report = protection.report()
    assert repr(report.kl) == repr(report.loss_now) == repr(kl)
    assert sentence in str(report)
    assert "Weights are NaN or infinite" in str(report)
    assert "Weights moved" not in str(report)
    assert "0.0000" not in str(report)


def test_answers_with_nan_agree_with_nothing() -> None:
    model = classifier()
    protection = syngap.protect(model, inputs(), gate=False)
    former = model.eval()(inputs()).argmax(-1)
    model.register_forward_hook(
        lambda *of: of[-1].masked_fill(of[-1].argmax(-1, keepdim=True) == 0, torch.nan)
    )
    report = protection.report()
    assert 0 < (former == 0).float().mean() < 1
    assert report.agreement == pytest.approx(float((former != 0).float().mean()))
    assert "Weights moved by 0.00%" in str(report)
    assert "what it knew is lost" in str(report)


@pytest.mark.parametrize("size", [300, 4])
def test_labels_in_place_of_inputs_are_named(size: int) -> None:
    with pytest.raises(RuntimeError, match="look like labels: pass the inputs"):
        syngap.protect(nn.Linear(4, 3), torch.randint(0, 3, (size,)))


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.linear(batch["x"])
        return out


class Asserts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, "expected two dimensions"
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "known", "said"),
    [
        (nn.Linear(4, 3), torch.randn(20, 5), r"known inputs of shape \(16, 5\)"),
        (
            Asserts(4, 3),
            torch.randn(20, 1, 4),
            r"inputs of shape \(16, 1, 4\)",
        ),
        (nn.Conv2d(3, 4, 3), torch.randn(8, 6, 6, 3), r"known\.permute\(0, 3, 1, 2\)"),
        (TakesDict(), {"x": torch.randn(8, 4)}, r"predict=lambda batch: model\(batch\)"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.randn(8, 4), "Bernoulli"),
    ],
    ids=["width", "assertion", "channels", "dict", "one logit"],
)
def test_known_inputs_that_a_model_does_not_take_are_described(
    model: nn.Module, known: Any, said: str
) -> None:
    with pytest.raises((RuntimeError, AssertionError, TypeError, ValueError), match=said):
        syngap.protect(model, known)


PARTS = [{}, {"gate": False}, {"teacher": False}, {"rotate": False}]


def train_one_step(model: nn.Module, protection: Protection, base: torch.optim.Optimizer) -> None:
    optimizer = protection.optimizer(base)
    (protection.loss() + model(inputs()).square().mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_weights_that_are_loaded_after_protect_are_warned_of(
    parts: dict[str, bool], kind: type[torch.optim.Optimizer], model: nn.Module
) -> None:
    """What is kept would be what the model knew before it had them."""
    model = copy.deepcopy(model)
    others = {name: value + 0.1 for name, value in model.state_dict().items()}
    protection = syngap.protect(model, inputs(), **parts)
    base = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    model.load_state_dict(others)
    with pytest.warns(UserWarning, match=r"load weights first, then call protect\(\)"):
        train_one_step(model, protection, base)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_same_weights_again_and_those_of_a_resumed_run_are_not_warned_of(
    parts: dict[str, bool], kind: type[torch.optim.Optimizer], model: nn.Module
) -> None:
    start, trained = copy.deepcopy(model), copy.deepcopy(model)
    first = syngap.protect(trained, inputs(), **parts)
    base = kind(trained.parameters(), lr=0.01)  # type: ignore[call-arg]
    trained.load_state_dict(start.state_dict())  # as DDP does
    optimizer = first.optimizer(base)
    for _ in range(2):
        (first.loss() + trained(inputs()).square().mean()).backward()
        optimizer.step()
    again = syngap.protect(start, inputs(), **parts)
    resumed = again.optimizer(kind(start.parameters(), lr=0.01))  # type: ignore[call-arg]
    start.load_state_dict(trained.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    (again.loss() + start(inputs()).square().mean()).backward()
    resumed.step()
