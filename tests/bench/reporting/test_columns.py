"""The difference to ER and the paper's numbers: beside ours, with what is to be said of them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from refused import refused
from rich.console import Console
from runfolders import Made, write_experiment, write_run
from scipy import stats

from syngap.bench.config.experiment import Experiment, read
from syngap.bench.reporting import paper
from syngap.bench.reporting.headline import headline
from syngap.bench.reporting.page import page_data
from syngap.bench.reporting.queries import run_query
from syngap.bench.reporting.reproduction import describe, reproductions
from syngap.bench.reporting.results import Results
from syngap.bench.reporting.rows import Row, rows
from syngap.bench.reporting.tables import best_rows, columns, default_columns, markdown, table
from syngap.bench.store.folder_reader import read_runs

Ends = dict[str, list[tuple[float, float]]]
WHOLE = ["ACC", "ACC-ER", "FM", "INT", "seconds"]


def made(folder: Path, ends: Ends, experiment: str = "mine") -> list[Row]:
    """Rows of two-task runs, from the accuracy in the end by row and seed."""
    write_experiment(folder, {}, ())
    for row, seeds in ends.items():
        for seed, (first, second) in enumerate(seeds):
            method = Made(row)
            R = [[first, second]] if row == "joint" else [[90, 0], [first, second]]
            write_run(folder, row, method, seed, R=R, every=50, extra={"experiment": experiment})
    return rows(read_runs(folder))


def column(found: list[Row], name: str) -> dict[str, str]:
    (only,) = columns(found, [name])
    return {row.name: " ".join(cell.split()) for row, cell in zip(found, only.cells, strict=True)}


def drawn(found: list[Row], width: int) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(table(found, width))
    return captured.get()


# The difference to ER


def test_the_difference_to_er_is_paired_and_has_its_interval(tmp_path: Path) -> None:
    # ACC of ER: 50, 60, 70; of SynGAP 4, 5 and 9 points more. Unpaired, the ± would be 25.
    ends = {
        "er": [(40, 60), (50, 70), (60, 80)],
        "syngap": [(44, 64), (55, 75), (69, 89)],
    }
    differences = (4, 5, 9)
    low, high = stats.t.interval(
        0.95, 2, loc=stats.tmean(differences), scale=stats.sem(differences)
    )
    found = made(tmp_path, ends)
    assert column(found, "ACC-ER") == {"er": "–", "syngap": f"+6.00 ± {(high - low) / 2:.2f}"}


def test_the_difference_to_er_is_over_shared_seeds(tmp_path: Path) -> None:
    ends = {"er": [(0, 0), (40, 60), (50, 70)], "sgd": [(9, 9), (0, 90), (10, 90)]}
    made(tmp_path, {**ends, "adam": [(0, 0), (40, 80)]})
    shutil.rmtree(tmp_path / "er-0")
    found = rows(read_runs(tmp_path))
    assert column(found, "ACC-ER")["sgd"].startswith("-7.50 ")  # seeds 1 and 2: -5 and -10
    assert column(found, "ACC-ER")["adam"].startswith("+10.00 ")


def test_without_a_row_called_er_there_is_no_difference_to_it(tmp_path: Path) -> None:
    found = made(tmp_path, {"sgd": [(0, 90)], "syngap": [(40, 60)]})
    assert "ACC-ER" not in default_columns(found)
    assert "ACC - ER" not in markdown(found)
    assert "ACC - ER" in markdown(made(tmp_path / "b", {"sgd": [(0, 90)], "er": [(40, 60)]}))


def test_a_column_without_a_value_is_left_out_of_table_and_page(tmp_path: Path) -> None:
    """INT is relative to joint training."""
    ends: Ends = {"er": [(40, 60)], "sgd": [(0, 90)]}
    without, whole = (
        made(tmp_path / name, {**ends, **joint})
        for name, joint in {"a": {}, "b": {"joint": [(90, 90)]}}.items()
    )
    for found, names in ((without, ["ACC", "ACC-ER", "FM", "seconds"]), (whole, WHOLE)):
        assert default_columns(found) == names
        for text in (markdown(found), drawn(found, 200)):
            assert ("INT" in text) == ("INT" in names)
    for place, found in (("a", without), ("b", whole)):
        shown = {one["name"] for one in page_data(read_runs(tmp_path / place), found)["measures"]}
        assert ("INT" in shown) == (found is whole)
        assert {"ACC", "FM", "seconds"} <= shown


def test_some_rows_of_a_table_are_still_set_against_er(tmp_path: Path) -> None:
    found = made(tmp_path, {"er": [(40, 60)], "sgd": [(0, 90)], "syngap": [(50, 60)]})
    text = markdown(found[2:], among=found)
    assert "+5.00" in text
    assert "SGD" not in text


def test_a_column_that_there_is_not() -> None:
    with refused('no column "second"; did you mean "seconds"?'):
        columns([], ["second"])


# The paper's numbers


def test_the_papers_numbers_stand_beside_ours_with_what_is_odd(tmp_path: Path) -> None:
    ends = {"er": [(40, 60)], "er_ace": [(50, 60)], "syngap": [(50, 60)], "joint": [(90, 90)]}
    found = made(tmp_path, ends, "table1-cifar100-shared")
    assert column(found, "paper-ACC") == {
        "er": "17.60 ± 4.25",
        "er_ace": "–",
        "syngap": "27.28 ± 0.58",
        "joint": "67.76",
    }
    for text in (markdown(found), " ".join(drawn(found, 200).split())):
        assert "paper's ACC" in text
        assert "ER's FM at 48.56" in text
        assert "54.23" in text
        assert "learning rates" in text


def test_without_its_columns_nothing_is_said_of_the_paper(tmp_path: Path) -> None:
    found = made(tmp_path, {"er": [(40, 60)]}, "table1-cifar100-shared")
    assert "paper" not in markdown(found, ["ACC", "FM"])
    assert "paper" not in markdown(made(tmp_path / "b", {"er": [(40, 60)]}))


def test_core50_says_that_its_split_was_probably_another() -> None:
    assert paper.quotes("core50-nc", "joint")["ACC"].mean == 99.60
    assert any("probably by frame" in note for note in paper.notes("core50-nc"))
    assert not any("CORe50" in note for note in paper.notes("table2-ablation"))


def test_the_ablation_has_the_numbers_of_its_own_table() -> None:
    assert paper.quotes("table2-ablation", "er")["FM"].mean == 54.23
    assert paper.quotes("table1-cifar100-tuned", "er")["FM"].mean == 48.56
    assert "Its ablations come without a spread." in paper.notes("table2-ablation")
    assert "Its ablations come without a spread." not in paper.notes("table1-cifar100-tuned")


@pytest.mark.parametrize("name", sorted(paper.EXPERIMENTS))
def test_quoted_rows_are_rows_of_the_experiment_that_ships(name: str) -> None:
    known = Experiment.from_mapping(read(name)).methods
    assert [row for row in paper.EXPERIMENTS[name] if row not in known] == []
    if name == "table2-ablation":
        options = {row: method.options for row, method in known.items()}
        assert options["unbounded"]["bounded"] is False
        assert options["low_alpha"]["retention"] < options["syngap"]["retention"]


# What shared a machine


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ((7, 14), "Seconds are with 7 or 14 runs at a time on one machine, so that not all rows"),
        ((7, 7), "Seconds are with 7 runs at a time on one machine."),
        ((1, 1), ""),
        ((None, None), ""),
    ],
)
def test_seconds_of_runs_that_shared_a_machine_say_so(
    workers: tuple[int | None, ...], said: str, tmp_path: Path
) -> None:
    made(tmp_path, {"er": [(40, 60)], "sgd": [(0, 60)]})
    runs = read_runs(tmp_path)
    commands = [f"syngap run a --workers {n}" if n else "syngap demo" for n in workers]
    runs = [
        replace(run, environment=run.environment.with_command(command))
        for run, command in zip(runs, commands, strict=True)
    ]
    text = markdown(rows(runs))
    assert ("runs at a time" in text) == bool(said)
    assert said in text
    assert "runs at a time" not in markdown(rows(runs), ["ACC"])


# What fits


def test_what_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    found = rows(read_runs(write_experiment(tmp_path, every=50)))
    for width in (60, 80, 100):
        text = drawn(found, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
    words = {width: " ".join(drawn(found, width).split()) for width in (60, 80, 100)}
    assert "Left out" not in words[100], "the demo's table fits in 100 columns"
    assert "seconds ↓" in words[100]
    assert "Too wide to show: seconds; --markdown has all." in words[80]
    assert "seconds ↓" not in words[80]
    assert "ACC - ER" in words[60]


def test_long_names_are_folded_before_columns_are_left_out(tmp_path: Path) -> None:
    options = {"lr": 0.1, "an_option": "with a value of many words"}
    own = Made("er", options={"lr": 0.1, "an_option": "short"})
    write_experiment(tmp_path, {"er": own, "other": Made("er", options=options)}, every=50)
    text = drawn(rows(read_runs(tmp_path)), 100)
    assert "seconds ↓" in text
    assert re.search(r"^ *many words *$", text, re.MULTILINE), text


# The best of a column


@pytest.mark.parametrize(
    ("forgetting", "best"),
    [
        ({"er": 5, "sgd": 9, "adam": -3}, []),  # it forgot nothing, and is not best
        ({"er": 0, "sgd": 9, "adam": -3}, ["er"]),
        ({"er": 0, "sgd": 0, "adam": -3}, ["er", "sgd"]),  # rows that tie share
        ({"er": -1, "sgd": -2, "adam": -3}, []),
        ({"er": 5, "sgd": 9, "adam": 7}, ["er"]),
    ],
    ids=["one-negative", "zero-and-negative", "tie-and-negative", "all-negative", "none-negative"],
)
def test_a_negative_forgetting_is_never_the_best(
    forgetting: dict[str, float], best: list[str], tmp_path: Path
) -> None:
    found = made(tmp_path, {row: [(90 - points, 50)] for row, points in forgetting.items()})
    assert best_rows(found, "FM") == set(best)
    lines = markdown(found, ["FM"]).splitlines()[2:5]
    assert {row.name for row, line in zip(found, lines, strict=True) if "**" in line} == set(best)
    assert not re.search(r"-\d\.\d\d\*", drawn(found, 200).split("INT")[0])
    (fm,) = (m for m in page_data([], found)["measures"] if m["name"] == "FM")
    assert set(fm["best"]) == set(best)


def test_a_negative_forgetting_is_not_the_best_of_a_curve(tmp_path: Path) -> None:
    rates = {"er": (0.1, 5), "er_mid": (0.3, 0), "er_high": (1.0, -3)}
    write_experiment(tmp_path / "a", {}, ())
    for row, (lr, points) in rates.items():
        method = Made("er", options={"lr": lr})
        R = [[90, 0], [90 - points, 50]]
        write_run(tmp_path / "a", row, method, 0, R=R, every=50, extra={"experiment": "a"})
    *_, line = run_query("curve a methods=er measure=FM", Results(tmp_path)).splitlines()
    assert line == "| ER | 5.0 | **0.0** | -3.0 |"


def test_other_measures_are_best_below_zero_too(tmp_path: Path) -> None:
    found = made(tmp_path, {"er": [(40, 95)], "sgd": [(40, 91)], "joint": [(90, 90)]})
    assert best_rows(found, "INT") == {"er"}
    assert found[0].values["INT"][0] < 0


# Too few seeds for an interval


def all_intervals(folder: Path, seeds: int) -> dict[str, str]:
    """Return every text that shows a difference with its interval, by where it is shown."""
    experiment = folder / "a"
    write_experiment(experiment, {}, ())
    for seed in range(seeds):
        for row, lr, above in (("er", 0.1, 0), ("er_high", 1.0, 0), ("syngap", 0.1, 5 + seed)):
            end = 40 + 3 * seed + above
            method = Made(row.partition("_")[0], options={"lr": lr})
            R = [[90, 0], [end, end]]
            write_run(experiment, row, method, seed, R=R, every=50, extra={"experiment": "a"})
        write_run(
            experiment, "syngap_high", Made("syngap", options={"lr": 1.0}), seed,
            R=[[90, 0], [50 + 4 * seed] * 2], every=50, extra={"experiment": "a"},
        )  # fmt: skip
    runs = read_runs(experiment)
    found = rows(runs)
    (reproduction,) = [r for r in reproductions(runs, runs) if r.label == "SynGAP"]
    return {
        "markdown": markdown(found, ["ACC-ER"]),
        "terminal": drawn(found, 200),
        "headline": headline(found),
        "page": json.dumps(page_data(runs, found)["against"]),
        "difference": run_query("difference a syngap er ACC", Results(folder)),
        "gain": run_query("gain a syngap er", Results(folder)),
        "reproduce": "\n".join(describe(reproduction)),
    }


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_interval_anywhere(seeds: int, tmp_path: Path) -> None:
    found = all_intervals(tmp_path, seeds)
    page = json.loads(found.pop("page"))
    assert [(each["accuracy"][1], each["ends"], each["forgets"]) for each in page] == [
        (None, None, None)
    ]
    for place, text in found.items():
        assert "too few seeds" in text.lower(), place
        assert "95 % interval " not in text.replace("95 % interval (Student's t)", ""), place
    assert "+5.00 (too few seeds)" in all_intervals(tmp_path / "one", 1)["markdown"]
    assert not re.search(r"[+-]\d+\.\d+ ± ", found["markdown"] + found["terminal"])
    assert "within ±" not in found["reproduce"]


def test_three_seeds_have_an_interval_everywhere(tmp_path: Path) -> None:
    found = all_intervals(tmp_path, 3)
    assert not any("too few seeds" in text.lower() for text in found.values())
    half = stats.t.ppf(0.975, 2) / 3**0.5  # of differences 5, 6 and 7
    assert f"+6.00 ± {half:.2f}" in found["markdown"]
    assert f"+6.00 ± {half:.2f}" in found["terminal"]
    assert f"+6.0 ± {half:.1f}" in found["headline"]
    assert json.loads(found["page"])[0]["accuracy"] == [6.0, round(half, 4)]
    assert found["difference"] == f"+6.0 (95 % interval +{6 - half:.1f} to +{6 + half:.1f})"
    assert "95 % interval" in found["gain"]
    assert "expected within ± " in found["reproduce"]
