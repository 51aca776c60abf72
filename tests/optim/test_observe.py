"""What observe takes, what it draws, how it averages, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import dictated
from oracle import Values, zeros
from samples import assert_near, importance_of, labelled, labels_for, observed, observer
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from syngap import SynGAP
from syngap.optim.scores import sample_labels

both_estimators = pytest.mark.parametrize("estimator", ["sampled", "exact"])


def network(outputs: int = 3, inputs: int = 4) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def batch(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def after_observing(optimizer: SynGAP, *predictions: Tensor | Distribution, **given: Any) -> Values:
    """The importance after a step that observed these."""
    for prediction in predictions:
        optimizer.observe(prediction, **given)
    optimizer.step()
    return importance_of(optimizer)


# The labels it draws ------------------------------------------------------------------------------


def chi_square(labels: Tensor, p: Tensor) -> float:
    counts = torch.bincount(labels.flatten(), minlength=len(p)).double()
    expected = p.double() * labels.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("shape", [(200_000,), (1000, 200)], ids=["rows", "tokens"])
def test_labels_have_the_frequencies_of_the_softmax(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 0.5, -4.0], dtype=dtype)
    labels = sample_labels(logits.expand(*shape, 5), torch.Generator().manual_seed(0))
    assert labels.shape == shape
    # Four degrees of freedom: a correct sampler exceeds 40 once in twenty million runs.
    assert chi_square(labels, logits.double().softmax(0)) < 40
    assert chi_square(labels, logits.double().mul(1.05).softmax(0)) > 40


def test_labels_of_different_rows_are_independent() -> None:
    logits = torch.zeros(200_000, 2, 2)
    first, second = sample_labels(logits, torch.Generator().manual_seed(0)).unbind(1)
    assert chi_square(2 * first + second, torch.full((4,), 0.25)) < 40


@both_estimators
def test_a_generator_reproduces_the_draws_and_spares_the_global_one(estimator: str) -> None:
    model, x = network(), batch(16, 4)

    def run(seed: int) -> Values:
        generator = torch.Generator().manual_seed(seed)
        return after_observing(observer(model, estimator, generator=generator), model(x))

    before = torch.get_rng_state()
    one, same, other = run(3), run(3), run(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@both_estimators
def test_without_a_generator_the_global_one_is_drawn_from(estimator: str) -> None:
    model, x = network(), batch(16, 4)

    def run(seed: int) -> Values:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = after_observing(observer(model, estimator), model(x))
        assert not torch.equal(torch.get_rng_state(), before)
        return found

    with torch.random.fork_rng(devices=[]):
        one, same, other = run(3), run(3), run(4)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


# What it takes ------------------------------------------------------------------------------------


@both_estimators
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)], ids=["rows", "tokens"])
def test_logits_are_the_categorical_they_stand_for(shape: tuple[int, ...], estimator: str) -> None:
    model, x = network(), batch(*shape)
    generator = torch.Generator().manual_seed(3)
    as_logits = after_observing(observer(model, estimator, generator=generator), model(x))
    labels = sample_labels(model(x), torch.Generator().manual_seed(3))
    as_distribution = observed(observer(model, estimator), model(x), labels)
    assert_near(as_logits, as_distribution, 1e-12)


def log_probability_of_bernoulli(logits: Tensor, values: Tensor) -> Tensor:
    p = 1 / (1 + torch.exp(-logits))
    return torch.log(torch.where(values == 1, p, 1 - p))


def log_probability_of_normal(mean: Tensor, values: Tensor) -> Tensor:
    return -((values - mean) ** 2) / (2 * 0.3**2)


FAMILIES: dict[str, tuple[Callable[[Tensor], Distribution], Callable[[Tensor, Tensor], Tensor]]] = {
    "bernoulli": (lambda out: Bernoulli(logits=out), log_probability_of_bernoulli),
    "normal": (lambda out: Normal(out, 0.3), log_probability_of_normal),
}


@both_estimators
@pytest.mark.parametrize("name", FAMILIES)
def test_a_distribution_is_observed_at_what_it_drew(name: str, estimator: str) -> None:
    """By hand: a row's score is that of its outputs together, and every output counts."""
    family, log_probability = FAMILIES[name]
    model, x = network(outputs=2), batch(6, 4)
    values = family(model(x).detach()).sample()
    found = after_observing(observer(model, estimator), dictated(family(model(x)), values))

    names, params = zip(*model.named_parameters(), strict=True)
    rows = [
        torch.autograd.grad(log_probability(model(x[row]), values[row]).sum(), params)
        for row in range(len(x))
    ]
    expected = {}
    for index, parameter in enumerate(names):
        each = torch.stack([row[index] for row in rows])
        total = each.sum(0) ** 2 if estimator == "sampled" else (each**2).sum(0)
        expected[parameter] = total / values.numel()
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize(("estimator", "draws"), [("sampled", 1500), ("exact", 300)])
def test_linear_regression_has_the_fisher_of_the_textbook(estimator: str, draws: int) -> None:
    """y ~ N(w·x + b, σ²): the diagonal is the mean of x²/σ², and 1/σ²; labels are never asked."""
    sigma, rows = 0.5, 12
    model, x = nn.Linear(3, 1).double(), batch(rows, 3)
    generator = torch.Generator().manual_seed(0)
    optimizer = observer(model, estimator)
    mean = zeros(model)
    for _ in range(draws):
        output = model(x)
        noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        drawn = output.detach() + sigma * noise
        prediction = dictated(Normal(output, sigma), drawn)
        for name, value in after_observing(optimizer, prediction).items():
            mean[name] += value / draws
    expected = {
        "weight": (x**2).mean(0, keepdim=True) / sigma**2,
        "bias": torch.tensor([1 / sigma**2], dtype=torch.float64),
    }
    # The square of a normal has relative variance 2; exact averages it over rows as well, of which
    # at worst a few carry a weight's importance.
    spread = math.sqrt(2 / draws)
    assert_near(mean, expected, 5 * spread)


@both_estimators
def test_a_masked_token_is_a_removed_token(estimator: str) -> None:
    model, x = network(), batch(6, 5, 4)
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    labels = labels_for(model(x))
    optimizer = observer(model, estimator)
    masked = after_observing(optimizer, labelled(model(x), labels), mask=mask)
    if estimator == "sampled":  # removed, tokens have no row to belong to
        kept = observed(observer(model, estimator), model(x)[mask], labels[mask])
    else:
        kept = zeros(model)
        for row in range(len(x)):
            alone = observer(model, "sampled")
            logits = model(x[row][mask[row]])
            for name, value in observed(alone, logits, labels[row][mask[row]]).items():
                kept[name] += value * int(mask[row].sum()) / int(mask.sum())
    assert_near(masked, kept, 1e-12)


def test_targets_of_the_empirical_estimator_leave_out_what_cross_entropy_does() -> None:
    model, x = network(), batch(6, 5, 4)
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    labels = labels_for(model(x))
    found = [
        after_observing(observer(model, "empirical"), logits, **given)
        for logits, given in [
            (model(x), {"targets": labels, "mask": mask}),
            (model(x), {"targets": labels.masked_fill(~mask, -100)}),
            (model(x)[mask], {"targets": labels[mask]}),
        ]
    ]
    assert_near(found[0], found[2], 1e-12)
    assert_near(found[1], found[2], 1e-12)


@both_estimators
@pytest.mark.parametrize("family", [lambda logits: logits, labelled], ids=["logits", "categorical"])
def test_scores_too_small_for_float16_are_not_lost(
    family: Callable[[Tensor], Tensor | Distribution], estimator: str
) -> None:
    """What reaches the first layer is below 6e-8, the smallest float16."""

    def run(dtype: torch.dtype) -> Values:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        with torch.no_grad():
            for layer, size in zip(model, (0.5, 2.0**-13, 2.0**-14), strict=True):
                coins = torch.randint(2, layer.weight.shape, generator=generator)
                layer.weight.copy_(size * (2 * coins - 1))
                layer.bias.zero_()
        model.to(dtype)
        optimizer = observer(model, estimator, generator=generator)
        return after_observing(optimizer, family(model(batch(32, 4).to(dtype))))

    half, single = run(torch.float16), run(torch.float32)
    assert all(value.dtype == torch.float32 for value in half.values())
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    assert 0 < single["0.weight"].max().sqrt() < smallest
    assert_near(half, single, 0.05)


# How it averages ----------------------------------------------------------------------------------


@both_estimators
def test_several_observations_average_by_prediction(estimator: str) -> None:
    model = network()
    large, small = batch(7, 4), batch(3, 4, seed=2)
    alone = [observed(observer(model, estimator), model(x)) for x in (large, small)]
    together = after_observing(
        observer(model, estimator), *(labelled(model(x)) for x in (large, small))
    )
    expected = {name: (7 * alone[0][name] + 3 * alone[1][name]) / 10 for name in together}
    assert_near(together, expected, 1e-12)
    if estimator == "exact":
        labels = torch.cat([labels_for(model(x)) for x in (large, small)])
        whole = observed(observer(model), model(torch.cat([large, small])), labels)
        assert_near(together, whole, 1e-12)


def test_zero_grad_forgets_what_was_observed() -> None:
    model, x = network(), batch(6, 4)
    optimizer = observer(model)
    expected = observed(optimizer, model(x))
    optimizer.observe(labelled(model(10 * x)))
    with pytest.warns(UserWarning, match="zero_grad.. discarded what observe.. took"):
        optimizer.zero_grad()
    optimizer.step()
    assert_near(importance_of(optimizer), expected, 0.0)


def test_what_is_discarded_leaves_gradients_and_says_nothing() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, estimator="empirical")
    logits = model(batch(4, 4))
    optimizer.observe(logits, targets=torch.zeros(4, dtype=torch.long))
    logits.sum().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.discard()
    optimizer.discard()
    torch.testing.assert_close(model[0].weight.grad, gradient)
    with pytest.warns(UserWarning, match="has no importance yet"):
        optimizer.step()
    assert all((value == 0).all() for value in optimizer.importance())


def test_zero_grad_after_a_skipped_step_says_nothing() -> None:
    model, x = network(), batch(6, 4)
    optimizer = observer(model)
    for _ in range(3):  # as under GradScaler: new gradients, but no step
        logits = model(x)
        optimizer.zero_grad()
        optimizer.observe(labelled(logits))
        logits.sum().backward()


def test_probabilities_in_place_of_logits_are_suspected() -> None:
    model = nn.Linear(3, 4)
    optimizer = SynGAP(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="sum to one: observe takes what goes into the softmax"):
        optimizer.observe(model(torch.randn(5, 3)).softmax(-1))


@both_estimators
@pytest.mark.parametrize("every", [1, 2, 3])
def test_importance_fades_by_steps_however_seldom_it_is_refreshed(
    every: int, estimator: str
) -> None:
    """After r refreshes of the same diagonal, F is 1 - retention^(1 + every · (r - 1)) of it."""
    model, x = network(), batch(6, 4)
    diagonal = observed(observer(model, estimator), model(x))
    optimizer = observer(model, estimator, every=every, warmup=0, retention=0.8)
    for step in range(7):
        found = observed(optimizer, model(x))
        share = 1 - 0.8 ** (1 + every * (step // every))
        assert_near(found, {name: share * value for name, value in diagonal.items()}, 1e-12)


@both_estimators
def test_importance_does_not_depend_on_the_batch_size(estimator: str) -> None:
    """Over every labelling with its probability: a batch and the same batch twice agree."""
    model = network(outputs=2)

    def expectation(x: Tensor) -> Values:
        optimizer = observer(model, estimator)
        p = model(x).detach().softmax(1)
        mean = zeros(model)
        for labelling in itertools.product(range(2), repeat=len(x)):
            labels = torch.tensor(labelling)
            probability = p.gather(1, labels.unsqueeze(1)).prod()
            for name, value in observed(optimizer, model(x), labels).items():
                mean[name] += probability * value
        return mean

    x = batch(3, 4)
    assert_near(expectation(torch.cat([x, x])), expectation(x), 1e-12)


# What it costs ------------------------------------------------------------------------------------


@both_estimators
def test_observing_costs_nothing_when_it_is_not_due(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    grad = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    model, x = network(), batch(6, 4)
    optimizer = observer(model, estimator, every=3, warmup=0)
    generator_states = []
    for _ in range(7):
        before = torch.get_rng_state()
        optimizer.observe(model(x))
        generator_states.append(torch.equal(torch.get_rng_state(), before))
        optimizer.step()
    assert passes == 3
    assert generator_states == [False, True, True, False, True, True, False]


@both_estimators
def test_observing_is_one_backward_pass(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's backward runs at most once, whatever the number of samples."""
    model, x = network(), batch(50, 4)
    optimizer = observer(model, estimator)
    logits = model(x)
    runs: list[str] = []
    waiting = [logits.grad_fn]
    handles = []
    while waiting:
        node = waiting.pop()
        assert node is not None
        name = node.name()
        handles.append(node.register_hook(lambda *_, name=name: runs.append(name)))
        waiting += [child for child, _ in node.next_functions if child is not None]
    optimizer.observe(logits)
    for handle in handles:
        handle.remove()
    assert runs.count("AddmmBackward0") <= 2
    assert runs.count("TanhBackward0") == 1


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        (
            lambda logits: logits.tolist(),
            TypeError,
            "taken from logits .* got list",
        ),
        (lambda logits: logits[:, 0], ValueError, r"shape \(N, C\)"),
        (lambda logits: logits[:0], ValueError, "N ≥ 1"),
        (lambda logits: logits.argmax(1, keepdim=True), ValueError, "floating point"),
        (lambda logits: logits[:, :1], ValueError, "at least two classes.*Bernoulli"),
        (lambda logits: logits.detach(), RuntimeError, "still has its graph"),
        (lambda logits: Categorical(logits=logits[0]), ValueError, "batch dimension"),
        (lambda logits: Categorical(logits=logits.detach()), RuntimeError, "still has its graph"),
        (lambda logits: batch(6, 3).requires_grad_() * 1, RuntimeError, "does not depend on any"),
    ],
)
@both_estimators
def test_what_cannot_be_observed_is_said(
    estimator: str,
    prediction: Callable[[Tensor], Any],
    error: type[Exception],
    message: str,
) -> None:
    model, x = network(), batch(6, 4)
    optimizer = observer(model, estimator)
    with pytest.raises(error, match=message):
        optimizer.observe(prediction(model(x)))


def test_classes_ruled_out_have_no_share() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    x = torch.randn(6, 3)
    ruled_out = torch.tensor([False, True, False, True, False])
    masked = SynGAP(
        model.parameters(), lr=0.0, retention=0.0, generator=torch.Generator().manual_seed(1)
    )
    masked.observe(model(x).masked_fill(ruled_out, -torch.inf))
    masked.step()
    weight, bias = masked.importance()
    assert not weight[ruled_out].any()
    assert not bias[ruled_out].any()
    assert (weight[~ruled_out] > 0).all()


def test_half_precision_in_between_does_not_lose_small_scores() -> None:
    """The logits are wide again, but the gradients went through float16 on their way."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 4)
    with torch.no_grad():
        head.weight.mul_(1e-5)
    diagonals = []
    for kind in (torch.float32, torch.float16):
        optimizer = SynGAP(
            body.parameters(), lr=0.0, retention=0.0, generator=torch.Generator().manual_seed(3)
        )
        hidden = body(torch.ones(16, 8)).to(kind)
        optimizer.observe(nn.functional.linear(hidden, head.weight.to(kind)).float())
        optimizer.step()
        diagonals.append(optimizer.importance()[0])
    wide, half = diagonals
    assert (half - wide).abs().max() < 0.05 * wide.abs().max()


# Where the classes are ----------------------------------------------------------------------------

FIRST = r"classes in dimension 1, .*movedim\(1, -1\).*flatten\(0, -2\)"


def pictures(classes: int = 5) -> tuple[nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(3, classes, 1), torch.randn(2, 3, 8, 8)


def dense(classes: int = 5) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, classes), torch.randn(2, 8, 8, 3)


CLASSES_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "as they come": lambda logits: logits,
    "scaled": lambda logits: logits * 0.5,
    "capped": lambda logits: torch.tanh(logits / 30.0) * 30.0,
    "made larger": lambda logits: F.interpolate(logits, scale_factor=2.0, mode="bilinear"),
    "cut out": lambda logits: logits[:, :, 1:, 2:],
    "in half precision": lambda logits: logits.bfloat16(),
    "another order in memory": lambda logits: logits.to(memory_format=torch.channels_last),
    "two joined": lambda logits: torch.cat([logits, logits], dim=1),
    "normalised": nn.BatchNorm2d(5),
}


@pytest.mark.parametrize("change", CLASSES_FIRST.values(), ids=CLASSES_FIRST)
def test_images_with_the_classes_in_dimension_1_are_refused(
    change: Callable[[Tensor], Tensor],
) -> None:
    model, x = pictures()
    optimizer = SynGAP(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=FIRST):
        optimizer.observe(change(model(x)))
    with pytest.raises(ValueError, match=FIRST):
        optimizer.consolidate(model, x, predict=lambda batch: change(model(batch)))
    optimizer.observe(change(model(x)).movedim(1, -1))  # and what the message says is accepted
    optimizer.observe(change(model(x)).flatten(0, -2))


def test_images_that_a_layer_gave_and_the_user_moved_are_refused_by_their_order() -> None:
    """As for a loss that takes classes in dimension 1; a compiled model hides what made them."""
    model, x = dense()
    with pytest.raises(ValueError, match=FIRST):
        SynGAP(model.parameters(), lr=0.1).observe(model(x).permute(0, 3, 1, 2))


CLASSES_LAST: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}
for name, (kind, change) in {
    "a dense layer": (dense, lambda logits: logits),
    "moved": (pictures, lambda logits: logits.movedim(1, -1)),
    "moved, copied": (pictures, lambda logits: logits.movedim(1, -1).contiguous()),
    "permuted, scaled": (pictures, lambda logits: logits.permute(0, 2, 3, 1) * 2.0),
    "transposed": (pictures, lambda logits: logits.transpose(1, -1)),
    "square": (lambda: dense(8), lambda logits: logits),
    "channels last, moved": (
        pictures,
        lambda logits: logits.to(memory_format=torch.channels_last).movedim(1, -1),
    ),
}.items():

    def observed_last(kind: Any = kind, change: Any = change) -> tuple[nn.Module, Tensor]:
        model, x = kind()
        return model, change(model(x))

    CLASSES_LAST[name] = observed_last


@pytest.mark.parametrize("case", CLASSES_LAST)
def test_nothing_is_said_where_the_classes_are_last(case: str) -> None:
    model, logits = CLASSES_LAST[case]()  # a warning would be an error
    SynGAP(model.parameters(), lr=0.1).observe(logits)


def test_language_models_are_left_in_peace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 9))
    optimizer = SynGAP(model.parameters(), lr=0.1)
    tokens = torch.randint(9, (3, 9))
    optimizer.observe(model(tokens))
    optimizer.observe(model(tokens), mask=tokens > 2)
    optimizer.observe(model(tokens)[:, :-1])


@pytest.mark.parametrize("given", ["mask", "targets"])
def test_the_shape_of_mask_or_targets_tells_where_the_classes_are(given: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 7)
    optimizer = SynGAP(model.parameters(), lr=0.1)
    logits = model(torch.randn(2, 5, 4))  # (2, 5, 7)
    fits = {"mask": torch.ones(2, 5, dtype=torch.bool), "targets": torch.zeros(2, 5).long()}
    optimizer.observe(logits, **{given: fits[given]})
    with pytest.raises(ValueError, match=FIRST):
        optimizer.observe(logits.transpose(1, 2), **{given: fits[given]})
    # A convolution whose last dimension has the classes: the mask says so.
    layer = nn.Conv2d(1, 1, 1)
    planes = torch.ones(2, 1, 6, dtype=torch.bool)
    SynGAP(layer.parameters(), lr=0.1).observe(layer(torch.randn(2, 1, 6, 4)), mask=planes)


def test_what_only_looks_like_classes_in_dimension_1_is_said_once() -> None:
    torch.manual_seed(0)
    series = nn.Conv1d(3, 5, 1)
    optimizer = SynGAP(series.parameters(), lr=0.1)
    logits = series(torch.randn(2, 3, 9))
    with pytest.warns(UserWarning, match=r"\(2, 5, 9\).*classes in dimension 1.*movedim\(1, -1\)"):
        optimizer.observe(logits)
    optimizer.observe(logits)  # a second warning would be an error
    unknown = nn.Linear(8, 8)
    square = torch.sort(unknown(torch.randn(2, 3, 8, 8)), dim=-1).values
    optimizer = SynGAP(unknown.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"\(2, 3, 8, 8\).*classes in dimension 1"):
        optimizer.observe(square)
