"""The plane holds the three networks exactly, in filter norms, and the surface is their loss."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import called, job, run_inline, tiny, written
from torch import nn
from torch.nn.functional import cross_entropy

from syngap.bench.config.experiment import Experiment
from syngap.bench.errors import UserError
from syngap.bench.landscapes.landscape import landscape, make_landscape, plan_landscapes
from syngap.bench.landscapes.plane import FilterNorm, Flat, random_plane, through
from syngap.bench.runner.run import method_factory, stream_of
from syngap.bench.store.surface import read_landscape, read_landscapes
from syngap.bench.training import train


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)
    )


def three():
    """Three networks far apart, their statistics of BatchNorm as different as their weights."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        state = network().state_dict()
        found.append(
            {
                name: torch.rand(value.shape, generator=chance) + 0.1
                if value.is_floating_point()
                else value + len(found)
                for name, value in state.items()
            }
        )
    return found


def plane_of(first, middle, last):
    learned = [name for name, _ in network().named_parameters()]
    norm = FilterNorm(middle, learned)
    return through(first, middle, last, norm, ["1.running_var"]), norm


# The plane


def test_lengths_are_shares_of_each_filters_own_norm():
    reference = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.5]]), "b": torch.tensor([7.0, 7.0])}
    norm = FilterNorm(reference, ["w", "b"])
    moved = {"w": torch.tensor([[5.0, 0.0], [0.0, 1.0]]), "b": torch.tensor([1e6, 1e6])}
    assert norm.length(moved) == pytest.approx(((1**2 + 2**2) / 2) ** 0.5)
    across = {"w": torch.tensor([[0.0, 5.0], [1.0, 0.0]]), "b": torch.tensor([1e6, 1e6])}
    assert norm(moved, across) == 0


def test_a_filter_of_zeros_does_not_count():
    norm = FilterNorm({"w": torch.tensor([[2.0, 0.0], [0.0, 0.0]])}, ["w"])
    assert norm.length({"w": torch.tensor([[0.0, 1.0], [9.0, 9.0]])}) == 0.5


def test_directions_are_orthonormal():
    plane, norm = plane_of(*three())
    assert norm(plane.first, plane.first) == pytest.approx(1, abs=1e-12)
    assert norm(plane.second, plane.second) == pytest.approx(1, abs=1e-12)
    assert norm(plane.first, plane.second) == pytest.approx(0, abs=1e-12)


def test_plane_gives_the_three_networks_back():
    states = three()
    plane, norm = plane_of(*states)
    places = [plane.coordinates(state) for state in states]
    for state, place in zip(states, places, strict=True):
        for name, value in plane.at(*place).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-7)
                assert value.dtype == state[name].dtype
    assert places[1] == (0, 0)
    assert places[0][1] == pytest.approx(0, abs=1e-12)
    assert places[0][0] < 0 < places[2][1]
    change = {name: states[2][name] - states[1][name] for name in states[1]}
    assert places[2][0] ** 2 + places[2][1] ** 2 == pytest.approx(norm(change, change))
    assert all(plane.distance(state) == pytest.approx(0, abs=1e-7) for state in states)


def test_shadow_of_a_network_outside_the_plane():
    states = three()
    plane, norm = plane_of(*states)
    other = three()[0]
    other["4.weight"] = other["4.weight"] + 1.0
    x, y = plane.coordinates(other)
    shadow = plane.at(x, y)
    off = {name: other[name].double() - shadow[name].double() for name in plane.first}
    assert norm(off, plane.first) == pytest.approx(0, abs=1e-6)
    assert norm(off, plane.second) == pytest.approx(0, abs=1e-6)
    assert plane.distance(other) == pytest.approx(norm.length(off), abs=1e-6)
    assert plane.distance(other) > 0.1


def test_variances_never_fall_below_those_of_the_three():
    states = three()
    plane, _ = plane_of(*states)
    lowest = torch.stack([state["1.running_var"] for state in states]).amin(0)
    for x in (-50.0, 50.0):
        for y in (-50.0, 50.0):
            assert (plane.at(x, y)["1.running_var"] >= lowest).all()
    assert (plane.at(50, -50)["1.weight"] < 0).any() or (plane.at(-50, 50)["1.weight"] < 0).any()


def test_networks_on_a_line_are_refused():
    first, middle, _ = three()
    beyond = {name: 2 * middle[name] - first[name] for name in middle}
    with pytest.raises(Flat, match="along one line"):
        plane_of(first, middle, beyond)
    with pytest.raises(Flat, match="did not move"):
        plane_of(middle, middle, first)


def test_random_directions_are_scaled_filter_by_filter():
    _, middle, _ = three()
    norm = FilterNorm(middle, [name for name, _ in network().named_parameters()])
    chance = torch.Generator().manual_seed(0)
    plane = random_plane(middle, norm, lambda like: torch.randn(like.shape, generator=chance))
    for name in ("0.weight", "4.weight"):
        sizes = plane.first[name].flatten(1).norm(dim=1)
        torch.testing.assert_close(sizes, middle[name].double().flatten(1).norm(dim=1))
    assert norm(plane.first, plane.second) == pytest.approx(0, abs=1e-12)
    for name in ("0.bias", "1.weight", "1.running_mean", "1.running_var"):
        assert not plane.first[name].any()
        torch.testing.assert_close(plane.at(3.0, -2.0)[name], middle[name], rtol=0, atol=0)


# The surface


SETTINGS = (
    "model={name: resnet18, width: 2}",
    "stream.batch=50",
    "methods.syngap={lr: 0.3, buffer: 20, replay: 10}",
    "training.threads=1",
)


def config(row, *settings):
    return job(None, *SETTINGS, *settings, row=row).config


def first_task(stream):
    """Every training sample of task 1, as stored."""
    batches = [stream[step] for step in range(stream.ends[0])]
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


class Remember:
    """A journal that keeps the network at the ends of tasks."""

    def __init__(self):
        self.states, self.made = [], None

    def load(self):
        return None

    def record(self, evaluation, summary):
        if evaluation.step == 0:
            self.save({})

    def advance(self, step):
        return False

    def save(self, state):
        model = self.made.learner.model
        self.states.append({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("row", ["sgd", "syngap"])
def test_surface_is_the_loss_of_the_networks_that_a_run_has(row):
    whole = 10**6
    told = config(row)
    found = landscape(told, None, points=3, samples=whole)

    stream = stream_of(told, None)
    journal = Remember()
    begin = method_factory(told, stream, torch.device("cpu"))

    def begun():
        journal.made = begin()
        return journal.made

    train(stream, begun, journal)
    x, y = first_task(stream)
    assert found.samples == len(y)
    direct = {}
    for name, state in zip(found.grid.points, journal.states, strict=True):
        journal.made.learner.model.load_state_dict(state)
        logits = journal.made.learner.evaluate(x)
        direct[name] = float(cross_entropy(logits, y))
        accuracy = 100 * float((logits.argmax(1) == y).float().mean())
        assert found.accuracies_at_points[name] == pytest.approx(accuracy, abs=0.01)
    assert found.losses_at_points == pytest.approx(direct, rel=1e-4)
    assert direct["task 1"] < direct["initialisation"]


def test_grid_and_points_are_the_same_function(monkeypatch):
    """A grid laid through a point has there what was evaluated directly."""
    import syngap.bench.landscapes.landscape as module

    told = config("er")
    plain = landscape(told, None, points=2, samples=200)
    for name, (a, b) in plain.grid.points.items():
        monkeypatch.setattr(module, "_window", lambda *_, a=a, b=b: ([a, a + 1], [b, b + 1]))
        found = landscape(told, None, points=2, samples=200)
        assert found.grid.loss[0][0] == pytest.approx(plain.losses_at_points[name], rel=1e-4)
        assert found.grid.accuracy[0][0] == pytest.approx(plain.accuracies_at_points[name])
        assert found.grid.loss[1][0] != pytest.approx(found.grid.loss[0][0], rel=1e-3)


def test_path_goes_from_point_to_point_inside_the_grid():
    found = landscape(config("er"), None, points=4, samples=100, random=True)
    grid = found.grid
    steps = [step for *_, step in grid.path]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert len(found.path_losses) == len(found.path_distances) == len(steps) > 10
    on_path = {(x, y) for x, y, _ in grid.path}
    assert set(grid.points.values()) <= on_path
    assert all(grid.x[0] < x < grid.x[-1] and grid.y[0] < y < grid.y[-1] for x, y in on_path)
    ends = [steps.index(0), steps.index(max(steps))]
    assert [found.path_distances[end] for end in ends] == pytest.approx([0, 0], abs=1e-6)
    assert max(found.path_distances) > 0.01
    assert grid.x[-1] - grid.x[0] == pytest.approx(grid.y[-1] - grid.y[0], rel=1e-4)
    # In random directions the same path is a dot.
    assert abs(found.random.points["task 2"][0]) < 0.3 * abs(grid.points["task 2"][1])
    assert found.random.x[-1] == pytest.approx((grid.x[-1] - grid.x[0]) / 2, rel=1e-4)


def test_samples_are_the_same_for_every_method():
    losses = [
        landscape(config(row), None, points=2, samples=37).losses_at_points["initialisation"]
        for row in ("sgd", "er")
    ]
    assert losses[0] == losses[1]
    assert landscape(config("sgd"), None, points=2, samples=37).samples == 37


def test_a_blurred_stream_is_judged_on_task_1_alone():
    told = config("sgd", "stream.blur=0.5")
    stream = stream_of(told, None)
    _, y = first_task(stream)
    mine = int((stream.class_task[y] == 0).sum())
    found = landscape(told, None, points=2, samples=10**6)
    assert found.samples == mine < len(y)


# The folder and the command


def test_folder_is_complete_and_reads_back(tmp_path):
    (made,) = plan_landscapes(
        Experiment.from_mapping(tiny(*SETTINGS)).select(["er"], [3]), tmp_path / "out"
    )
    found = make_landscape(made, points=3, samples=50, random=True)
    folder = tmp_path / "out" / "er-3"
    assert [path.name for path in folder.iterdir()] == ["landscape.json"]
    content = json.loads((folder / "landscape.json").read_text())
    assert {"format", "method", "row", "seed", "task", "x", "y", "loss", "accuracy"} <= set(content)
    assert {"path", "points", "losses_at_points", "samples", "seconds"} <= set(content)
    assert read_landscape(folder / "landscape.json") == found
    assert found.config == made.config.as_mapping()
    assert found.environment.command
    assert str(tmp_path) not in json.dumps(content), "it may be published as it is"
    assert read_landscapes(tmp_path / "out") == [found]
    (tmp_path / "out").rename(tmp_path / "landscapes")
    assert read_landscapes(tmp_path) == [found]


def test_command_computes_and_refuses_to_write_over(tmp_path, capsys):
    file = written(tmp_path, *SETTINGS)
    command = ["landscape", file, "--points", 2, "--samples", 20, "--out", tmp_path / "out"]
    code, _, told = called(capsys, *command, "--methods", "sgd,syngap")
    assert code == 0
    assert "1 of 2  sgd-0" in told
    assert f"`syngap report {tmp_path / 'out'}` draws them" in told
    assert "loss of task 1: initialisation" in told
    assert [found.row for found in read_landscapes(tmp_path / "out")] == ["sgd", "syngap"]
    code, _, told = called(capsys, *command, "--methods", "sgd")
    assert code == 2
    assert "holds a landscape already; --fresh computes it again" in told
    assert called(capsys, *command, "--methods", "sgd", "--fresh")[0] == 0


def test_landscapes_may_come_before_the_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("syngap.bench.runner.local.run_local", run_inline)
    file = written(tmp_path)
    chosen = ["--methods", "er"]
    code, _, told = called(capsys, "landscape", file, *chosen, "--points", 2, "--samples", 20)
    assert code == 0
    assert "are in runs/tiny/landscapes; `syngap report runs/tiny` draws them\n" in told
    assert (tmp_path / "runs" / "tiny" / "landscapes" / "er-0" / "landscape.json").is_file()
    assert called(capsys, "run", file, *chosen)[0] == 0
    assert '"landscapes":[{' in (tmp_path / "runs" / "tiny" / "index.html").read_text()
    assert called(capsys, "run", file, *chosen, "--fresh")[0] == 0
    assert read_landscapes(tmp_path / "runs" / "tiny") != []


def test_stream_of_ten_tasks_is_cut_to_two_and_keeps_its_head(tmp_path):
    experiment = Experiment.from_mapping(tiny(*SETTINGS, "stream.first=null")).select(["sgd"], [0])
    (made,) = plan_landscapes(experiment, tmp_path)
    assert made.config.stream.options["first"] == 2
    assert stream_of(made.config, None).classes == 10
    assert len(stream_of(made.config, None).ends) == 2


def test_what_has_no_path_is_refused(tmp_path):
    joint = Experiment.from_mapping(tiny("methods={joint: {}}"))
    with pytest.raises(UserError, match=r"methods\.joint: it sees all tasks at once"):
        plan_landscapes(joint, tmp_path)
    plain = Experiment.from_mapping(tiny()).select(["sgd"], [0])
    (tmp_path / "sgd-0").mkdir()
    (tmp_path / "sgd-0" / "status.json").write_text("{}")
    with pytest.raises(UserError, match="holds a run; give another --out"):
        plan_landscapes(plain, tmp_path)


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", "{}", '{"format": 1}', "x"],
)
def test_a_file_that_is_no_landscape_is_named(tmp_path, broken):
    path = tmp_path / "landscape.json"
    path.write_text(broken)
    with pytest.raises(UserError, match=r"landscape\.json: not as syngap wrote it"):
        read_landscape(path)
