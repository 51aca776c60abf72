"""Every figure that a folder has the data for, as SVG and PDF, the same bytes each time."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from runfolders import LAYERS, RATES, Made, write_experiment, write_made_landscape, write_run
from tiny import called

from syngap.bench.errors import UserError
from syngap.bench.reporting import figures
from syngap.bench.reporting.curves import Sweep, sweeps, variants
from syngap.bench.reporting.figures import (
    every_figure,
    landscape_figure,
    plasticity_figure,
    sweep_figure,
)
from syngap.bench.reporting.landscapes import contour_levels
from syngap.bench.reporting.page import embed_json, page_data
from syngap.bench.reporting.rows import rows
from syngap.bench.reporting.series import layers, plasticity_curve
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.store.surface import read_landscapes

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = write_experiment(tmp_path_factory.mktemp("rates"), RATES, (0, 1), every=25)
    for row in ("syngap", "sgd", "er"):
        write_made_landscape(runs / "landscapes", row, row)
    return runs


@pytest.fixture(scope="module")
def runs(folder):
    return read_runs(folder)


@pytest.fixture(scope="module")
def landscapes(folder):
    return read_landscapes(folder)


# Rows that differ in one option


def test_rates_of_each_method_make_a_line(runs):
    (sweep,) = sweeps(rows(runs))
    assert (sweep.option, sweep.name, sweep.logarithmic) == ("lr", "learning rate", True)
    assert {line.label: line.values for line in sweep.lines} == {
        "ER": [0.1, 0.3, 1.0],
        "SynGAP": [0.03, 0.3],
    }
    assert [row.name for row in sweep.lines[0].rows] == ["er", "er_lr0.3", "er_lr1.0"]
    assert [line.best for line in sweep.lines] == [0, 1]
    assert sweep.values == [0.03, 0.1, 0.3, 1.0]
    assert variants([sweep]) == ["er_lr0.3", "er_lr1.0", "syngap_lr0.03"]


def test_another_option_takes_three_values_and_all_else_equal(tmp_path):
    own = {"lr": 0.3, "retention": 0.999, "bounded": True}
    made = {
        "syngap": Made("syngap", options=own),
        "a": Made("syngap", options={**own, "retention": 0.9}),
        "b": Made("syngap", options={**own, "retention": 0.99}),
        "c": Made("syngap", options={**own, "retention": 0.5, "bounded": False}),
    }
    write_experiment(tmp_path, made, (0,), every=50)
    found = rows(read_runs(tmp_path))
    (sweep,) = sweeps(found)
    assert (sweep.option, sweep.values, sweep.logarithmic) == (
        "retention",
        [0.9, 0.99, 0.999],
        False,
    )
    assert sweeps([row for row in found if row.name != "b"]) == []


def test_rows_without_a_finished_seed_are_no_point(tmp_path):
    some = {row: RATES[row] for row in ("er", "er_lr0.3")}
    write_experiment(tmp_path, some, (0,), every=50)
    write_run(tmp_path, "er_lr1.0", RATES["er_lr1.0"], 0, state="failed")
    (sweep,) = sweeps(rows(read_runs(tmp_path)))
    (line,) = sweep.lines
    assert line.values == [0.1, 0.3]
    assert sweep.values == [0.1, 0.3, 1.0], "but have their place"
    assert sweep.omissions == ["ER at 1 (0 of 1 seed)"]
    sweep_figure(sweep, tmp_path / "with.svg")
    sweep_figure(Sweep("lr", [replace(line, unfinished_rows={})]), tmp_path / "without.svg")
    drawn = {name: (tmp_path / f"{name}.svg").read_text() for name in ("with", "without")}
    assert drawn["with"].count("<use ") > drawn["without"].count("<use ")


# Layers


def test_layers_after_each_task(runs):
    found = layers([run for run in runs if run.row == "syngap"])
    assert found.names == list(LAYERS)
    # As runfolders has it: 1e-5 · 10^number · (1 + place), over the network's 1e-4.
    expected = [[0.1 * 10**number * (1 + task) for task in range(1, 6)] for number in range(6)]
    assert found.importance == [pytest.approx(line) for line in expected]
    assert all(line == sorted(line, reverse=True) for line in found.plasticity)
    assert found.only(["2.weight"]).importance == [pytest.approx(expected[2])]


def test_seeds_that_tell_nothing_of_layers_are_left_out(tmp_path):
    some = write_experiment(tmp_path, {"syngap": RATES["syngap"]}, (0, 1), every=50)
    before = layers(read_runs(some)[:1])
    record = some / "syngap-1" / "metrics.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps({**line, "summary": {}}) + "\n" for line in lines))
    found = read_runs(some)
    assert layers(found) == before
    assert plasticity_curve(found).lines["/mean"].sd is None
    assert plasticity_curve(found[1:]) is None
    assert layers(found[1:]) is None


# Levels


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.4, 4.0, [0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5]),
        (0.04, 40.0, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]),
        (0.0, 40.0, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100]),
        (0.0, 1e6, [10.0**power for power in range(-3, 7)]),
        (1.0, 1.0, [1.0, 10.0]),
    ],
)
def test_levels_are_round_and_hold_every_loss(tmp_path, low, high, expected):
    path = write_made_landscape(tmp_path, "er", "er", points=2, random=False)
    content = json.loads(path.read_text())
    content["loss"] = [[low, high], [None, high]]
    path.write_text(json.dumps(content))
    (found,) = read_landscapes(tmp_path)
    assert contour_levels([found]) == pytest.approx(expected)


def test_levels_end_where_there_are_enough(landscapes):
    assert len(contour_levels(landscapes[:1], most=3)) == 3


# Figures


@pytest.mark.slow
def test_report_draws_every_figure_with_the_same_bytes_each_time(
    folder, runs, landscapes, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(figures, "FORMATS", ("svg",))  # PDF: below
    written, reasons = every_figure(runs, landscapes, tmp_path / "a")
    code, printed, _ = called(capsys, "report", folder, "--figures", tmp_path / "b")
    assert (reasons, code) == ([], 0)
    assert "by-lr, layers, layers-norms-and-biases, landscape, landscape-random" in printed
    assert '"landscapes":[{' in (folder / "index.html").read_text()
    names = ["plasticity", "stream", "by-lr", "layers", "layers-norms-and-biases"]
    names += ["landscape", "landscape-random"]
    assert [path.name for path in written] == [f"{name}.svg" for name in names]
    for path in written:
        content = path.read_bytes()
        assert content == (tmp_path / "b" / path.name).read_bytes()
        assert content.startswith(b"<?xml")
        assert not re.search(rb"<dc:date>", content)


def test_a_pdf_has_the_same_bytes_each_time(tmp_path):
    paths = [tmp_path / "a.pdf", tmp_path / "b.pdf"]
    for path in paths:
        plasticity_figure(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"%PDF")
    assert b"/CreationDate" not in paths[0].read_bytes()


def test_what_a_folder_has_not_is_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FORMATS", ("svg",))
    write_experiment(tmp_path, {"joint": Made("joint")}, (0,), every=50)
    written, reasons = every_figure(read_runs(tmp_path), [], tmp_path / "figures")
    assert {path.stem for path in written} == {"plasticity"}
    assert reasons == [
        "stream: no method but joint training has finished: there is no stream to draw"
    ]
    written, reasons = every_figure([], [], tmp_path / "none")
    assert ({path.stem for path in written}, reasons) == ({"plasticity"}, [])


def test_figures_show_what_they_are_given(runs, landscapes, tmp_path):
    """Other data, other drawing."""
    (sweep,) = sweeps(rows(runs))
    (shorter,) = sweeps([row for row in rows(runs) if row.name != "er_lr1.0"])
    sweep_figure(sweep, tmp_path / "a.svg")
    sweep_figure(shorter, tmp_path / "b.svg")
    landscape_figure(landscapes, tmp_path / "c.svg")
    landscape_figure(landscapes, tmp_path / "d.svg", random=True)
    drawn = [(tmp_path / f"{name}.svg").read_bytes() for name in "abcd"]
    assert len(set(drawn)) == 4


def test_panels_are_in_the_order_of_the_methods(landscapes):
    assert [found.row for found in landscapes] == ["sgd", "er", "syngap"]


def test_a_figure_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a name that ends in \.svg or \.pdf"):
        plasticity_figure(tmp_path / "a.png")


# The command


def test_a_folder_of_landscapes_alone_has_a_page_and_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "FORMATS", ("svg",))
    write_made_landscape(tmp_path / "some", "er", "er", random=False)
    code, printed, _ = called(capsys, "report", tmp_path / "some", "--figures", tmp_path / "drawn")
    assert code == 0
    assert "plasticity, landscape" in printed
    assert (tmp_path / "some" / "index.html").is_file()


def test_landscapes_beside_runs_are_no_runs(tmp_path, capsys):
    write_experiment(tmp_path, {"er": RATES["er"]}, (0,), every=50)
    path = write_made_landscape(tmp_path, "sgd", "sgd")
    beside_it = {"config.yaml": "row: sgd\nseed: 0\n", "environment.json": "{}"}
    assert [run.row for run in read_runs(tmp_path)] == ["er"]
    lines = path.read_text().splitlines(True)
    old = [line for line in lines if not line.startswith(('"config"', '"environment"'))]
    path.write_text("".join(old).replace('"format": 2', '"format": 1'))
    for name, content in beside_it.items():  # as format 1 had it
        path.with_name(name).write_text(content)
    assert [run.row for run in read_runs(tmp_path)] == ["er"]
    assert [found.row for found in read_landscapes(tmp_path)] == ["sgd"]
    assert called(capsys, "report", tmp_path)[0] == 0


@pytest.fixture(scope="module")
def with_missing(landscapes, tmp_path_factory):
    """A figure of a landscape whose first column is missing."""
    first, path = landscapes[0], tmp_path_factory.mktemp("missing") / "b.svg"
    missing = [[None, *line[1:]] for line in first.grid.loss]
    landscape_figure([replace(first, grid=replace(first.grid, loss=missing))], path)
    return path.read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None], ids=str)
def test_a_number_that_is_not_finite_is_null_on_the_page_and_the_highest_level_in_a_figure(
    runs, landscapes, with_missing, tmp_path, value
):
    first = landscapes[0]
    loss = [[value, *line[1:]] for line in first.grid.loss]
    points = dict.fromkeys(first.losses_at_points, value)
    damaged = replace(first, grid=replace(first.grid, loss=loss), losses_at_points=points)
    found = json.loads(embed_json(page_data(runs, rows(runs), [damaged])))
    (drawn,) = found["landscapes"]
    assert [line[0] for line in drawn["grid"]["loss"]] == [None] * len(loss)
    assert drawn["losses"] == dict.fromkeys(points)
    assert found["levels"] == contour_levels([damaged])
    landscape_figure([damaged], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == with_missing


def test_page_data_of_landscapes_are_short(runs, landscapes):
    found = page_data(runs, rows(runs), landscapes)
    assert [each["label"] for each in found["landscapes"]] == ["SGD", "ER", "SynGAP"]
    assert found["landscapes"][0]["grid"]["loss"][-1][-1] is None
    assert max(len(json.dumps(v)) for v in found["landscapes"][0]["grid"]["loss"][0]) <= 7
    assert found["levels"][0] <= 0.01
