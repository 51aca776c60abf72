"""Documents say what results say: blocks are filled from them, and a stale one is found."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import growth
import pytest
import yaml
from checkout import ROOT
from refused import refused
from runfolders import Made, write_experiment, write_run, write_search
from tiny import called

from syngap.bench.config.experiment import complete_method
from syngap.bench.errors import UserError
from syngap.bench.finetuning.model_tasks import TASKS
from syngap.bench.metrics import accuracy
from syngap.bench.reporting import figures, paper
from syngap.bench.reporting.documents import fill, stale_blocks
from syngap.bench.reporting.figures import accuracy_figure, every_figure, landscape_figure
from syngap.bench.reporting.finetuning.comparison import compare_methods
from syngap.bench.reporting.finetuning.frontiers import frontier_figure
from syngap.bench.reporting.labels import labels
from syngap.bench.reporting.queries import QUERIES, run_query
from syngap.bench.reporting.reproduction import describe, reproductions
from syngap.bench.reporting.results import Results
from syngap.bench.reporting.tables import wall_clock
from syngap.bench.store.folder_reader import read_runs, read_yaml
from syngap.bench.store.outcome import Environment, Status
from syngap.bench.store.surface import read_landscapes

SHARED = "table1-cifar100-shared"
ACC = {  # row → by seed
    "er": (50, 52),
    "er_lr0.01": (40, 44),
    "syngap": (58, 62),
    "syngap_lr0.01": (30, 30),
    "syngap_lr1.0": (70, 75),
    "derpp": (60, 60),
    "er_small": (20, 20),
}
LR = {"er_lr0.01": 0.01, "syngap_lr0.01": 0.01, "syngap_lr1.0": 1.0, "er_small": 0.1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("there") / "results"
    write_experiment(folder / SHARED, {}, ())
    for row, ends in ACC.items():
        for seed, end in enumerate(ends):
            method = row.partition("_")[0]
            made = Made(
                method, options={"lr": LR.get(row, 0.3), "buffer": 20 if "small" in row else 200}
            )
            R = [[90, 0], [end - 10, end + 10]]
            extra = {"experiment": SHARED}
            write_run(folder / SHARED, row, made, seed, R=R, every=50, extra=extra)
    write_experiment(folder / "other", {"er": Made("er")}, (0,), every=50)
    return Results(folder)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# Queries


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("value er ACC", "51.0 ± 1.4"),
        ("value er ACC only=mean", "51.0"),
        ("value best:er ACC", "51.0 ± 1.4"),
        ("value best:syngap ACC only=mean", "72.5"),
        ("difference syngap er ACC only=mean", "+9.0"),
        ("difference syngap er ACC", "+9.0 (too few seeds)"),
        ("difference er syngap ACC only=mean", "−9.0"),
        ("difference syngap er ACC only=mean seeds=0..1", "+9.0"),
        ("difference best:syngap best:er ACC only=mean", "+21.5"),
        ("option best:syngap lr", "1.0"),
        ("paper syngap ACC", "27.28 ± 0.58"),
        ("paper syngap ACC less=er", "+9.7"),
        ("time syngap er", "1.0"),
        ("runs", "14 of 90"),
    ],
)
def test_single_numbers(query: str, said: str, results: Results) -> None:
    kind, *rest = query.split()
    assert run_query(" ".join([kind, SHARED, *rest]), results) == said


def test_numbers_over_fewer_seeds_say_so(tmp_path: Path) -> None:
    made = {"er": Made("er"), "sgd": Made("sgd")}
    write_experiment(tmp_path / "a", made, (0, 1, 2), every=50)
    write_run(tmp_path / "a", "sgd", made["sgd"], 1, state="failed", tasks_done=1)
    found = Results(tmp_path)
    assert run_query("value a sgd ACC", found).endswith(" (2 of 3 seeds)")
    assert run_query("difference a er sgd ACC", found).endswith(", 2 of 3 seeds)")
    assert "seeds" not in run_query("value a er ACC", found)


def test_a_difference_may_be_over_some_of_the_seeds(tmp_path: Path) -> None:
    for seed in range(4):
        gain = 2 * (seed > 1)  # of seeds 2 and 3 alone
        for row in ("er", "sgd"):
            end = 50 + gain * (row == "er")
            write_run(tmp_path / "a", row, Made(row), seed, R=[[90, 0], [end, end]], every=50)
    write_experiment(tmp_path / "a", {}, ())
    found = Results(tmp_path)
    assert run_query("difference a er sgd ACC only=mean seeds=2..3", found) == "+2.0"
    assert run_query("difference a er sgd ACC only=mean seeds=0,1", found) == "+0.0"
    assert run_query("difference a er sgd ACC only=mean", found) == "+1.0"
    with pytest.raises(UserError, match="seeds: there are no runs of 4"):
        run_query("difference a er sgd ACC seeds=2..4", found)


def test_a_curve_has_the_rows_that_differ_in_nothing_else(results: Results) -> None:
    head, _, er, syngap = run_query(f"curve {SHARED}", results).splitlines()
    assert head == "| ACC ↑ by lr | 0.01 | 0.3 | 1.0 |"
    assert er == "| ER | 42.0 ± 2.8 | **51.0 ± 1.4** | – |"
    assert syngap == "| SynGAP | 30.0 ± 0.0 | 60.0 ± 2.8 | **72.5 ± 3.5** |"


def test_a_curve_may_be_that_of_a_row_and_later_options_have_their_default(tmp_path: Path) -> None:
    given = {
        "er": {"lr": 0.3},  # of a run that is older than the option
        "er_lr0.01": {"lr": 0.01, "average": 0.0},
        "er_average": {"lr": 0.3, "average": 0.9},
        "er_average_lr0.01": {"lr": 0.01, "average": 0.9},
    }
    write_experiment(tmp_path / "a", {}, ())
    for place, (row, options) in enumerate(given.items()):
        made = Made("er", options=options)
        R = [[90, 0], [10 * place, 10 * place]]
        write_run(tmp_path / "a", row, made, 0, R=R, every=50, extra={"experiment": "a"})
    _, _, *lines = run_query("curve a methods=er,er_average", Results(tmp_path)).splitlines()
    assert lines == [
        "| ER | **10.0** | 0.0 |",
        "| ER, average 0.9 | **30.0** | 20.0 |",
    ]
    named = {row.name: row.label for row in Results(tmp_path).rows("a")}
    assert named["er_average_lr0.01"] == "ER, lr 0.01, average 0.9"


def test_a_row_that_is_older_than_an_option_is_told_from_its_methods_own() -> None:
    own, older = {"name": "er", "lr": 0.3, "average": 0.9}, {"name": "er", "lr": 0.3}
    found = labels({"er": own, "er_old": older})
    assert found == {"er": "ER, average 0.9", "er_old": "ER, average 0.0"}


def test_an_average_is_said_and_what_is_too_long_is_not() -> None:
    options = {f"option{number}": number for number in range(20)}
    rows = {
        "er": {"name": "er", "average": 0.9, "lr": 0.1, **options},
        "er_fast": {"name": "er", "average": 0.9, "lr": 1.0, **options},
        "er_other": {"name": "er", "average": 0.9, **dict.fromkeys(options, -1), "lr": 0.1},
    }
    assert labels(rows) == {
        "er": "ER, average 0.9",
        "er_fast": "ER, lr 1.0, average 0.9",
        "er_other": "ER (er_other)",
    }


def test_a_rate_at_which_all_seeds_diverged_stands_in_the_curve(tmp_path: Path) -> None:
    made = {rate: Made("er", options={"lr": rate}) for rate in (0.1, 0.3, 1.0)}
    write_experiment(tmp_path / "a", {"er": made[0.1], "er_mid": made[0.3]}, (0, 1), every=50)
    error = "FloatingPointError: the loss is nan"
    write_run(tmp_path / "a", "er_mid", made[0.3], 1, state="failed", error=error)
    for seed in (0, 1):
        write_run(tmp_path / "a", "er_high", made[1.0], seed, state="failed", error=error)
    head, _, er = run_query("curve a methods=er", Results(tmp_path)).splitlines()
    assert head == "| ACC ↑ by lr | 0.1 | 0.3 | 1.0 |"
    assert er.endswith(" (1 of 2 seeds, 1 diverged) | – (0 of 2 seeds, 2 diverged) |")


def test_a_search_is_told_by_row(tmp_path: Path) -> None:
    options = {"er": {"lr": 0.011, "momentum": 0.9}, "adam": {"lr": 0.001}}
    made = {row: Made(row, options=values) for row, values in options.items()}
    write_search(write_experiment(tmp_path / "a", made, (0,), every=50), options)
    lines = run_query("search a", Results(tmp_path)).splitlines()
    assert lines[2:4] == [
        "| ER | lr 0.01 to 1 (log); momentum 0 or 0.9 | lr 0.011 (lower edge); momentum 0.9"
        " | 50.00 | 3 | 1 | – | – |",
        "| Adam | lr 0.01 to 1 (log); momentum 0 or 0.9 | lr 0.001 (lower edge)"
        " | 50.00 | 3 | 1 | – | – |",
    ]
    said = lines[-1]
    assert said.startswith("3 trials of every row with seed 100, by Optuna TPE; on the table's ")
    assert "first 4" in said
    assert "Of Adam it has values that the search began with." in said
    assert said.endswith("Every trial is in `" + tmp_path.name + "/a/search/trials.csv`.")
    assert "does not have" not in said


def test_a_row_may_be_that_which_validation_chose(tmp_path: Path) -> None:
    ends = {"er": 50, "adam": 70, "sgd": 60, "joint": 90}
    folder = tmp_path / "a"
    for row, end in ends.items():
        write_run(folder, row, Made(row), 0, R=[[90, 0], [end, end]], every=50)
    write_experiment(folder, {}, ())
    results = Results(tmp_path)
    assert run_query("value a best ACC", results) == "70.0"
    with refused("a: no search there that has chosen a row"):
        run_query("value a validated ACC", results)
    path = write_search(folder, {row: {"lr": 0.1} for row in ends}).with_name("search.yaml")
    found = read_yaml(path)
    for row, score in {"er": 50.0, "adam": 40.0, "sgd": 60.0, "joint": 90.0}.items():
        found["chosen"][row]["ACC"] = score
    path.write_text(yaml.safe_dump(found))
    assert run_query("value a validated ACC", results) == "60.0"
    assert run_query("difference a validated best ACC only=mean", results) == "−10.0"


def test_a_search_says_where_the_table_has_other_values(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "a", {"er": Made("er", options={"lr": 0.3})}, (0,))
    path = write_search(folder, {"er": {"lr": 0.1}})
    said = run_query("search a", Results(tmp_path))
    assert "The table does not have what was chosen for ER." in said
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:-1]))
    with refused("search.yaml: ", "er: 3 trials, trials.csv has 2"):
        run_query("search a", Results(tmp_path))
    path.unlink()
    with refused("trials.csv: cannot be read (No such file or directory)"):
        run_query("search a", Results(tmp_path))
    path.with_name("search.yaml").write_text("trials: 3\n")
    path.write_text("row,state\n")
    with refused("search.yaml: not as syngap wrote it ('spaces' is missing)"):
        run_query("search a", Results(tmp_path))


def test_a_benchmarks_tables_are_quoted_by_number(tmp_path: Path) -> None:
    (tmp_path / "speed" / "cpu").mkdir(parents=True)
    (tmp_path / "speed" / "cpu" / "loop.md").write_text("on:\n\n| a |\n| - |\n\ntwo:\n\n| b |\n")
    results = Results(tmp_path)
    assert run_query("measured cpu/loop", results) == "| a |\n| - |"
    assert run_query("measured cpu/loop table=2", results) == "| b |"
    for query, why in (("cpu/loop table=3", "it has 2"), ("cpu/none", "make bench")):
        with pytest.raises(UserError, match=why):
            run_query(f"measured {query}", results)


def test_a_table_can_have_some_rows_and_columns(results: Results) -> None:
    text = run_query(f"table {SHARED} rows=derpp,syngap columns=ACC,ACC-ER", results)
    lines = text.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["DER++", "SynGAP"]
    assert lines[0].split() == ["|", "method", "|", "ACC", "↑", "|", "ACC", "-", "ER", "|"]
    assert "+9.00" in lines[3], "against ER, which is not in the table"
    assert "`syngap report results/table1-cifar100-shared`" in text
    assert "paper" not in text
    for note in paper.notes(SHARED):
        assert note in run_query(f"table {SHARED}", results)
        assert note in run_query(f"notes {SHARED}", results)


def test_text_says_where_it_was_made_as_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_experiment(tmp_path / "w" / "kept" / "a", {"er": Made("er")}, (0,), every=50)
    write_search(folder, {"er": {"lr": 0.1}})
    monkeypatch.chdir(tmp_path)
    for given, place in ((Path("w/kept"), "w/kept"), (tmp_path / "w" / "kept", "kept")):
        assert f"Made by `syngap report {place}/a`." in run_query("table a", Results(given))
        assert f"`{place}/a/search/trials.csv`" in run_query("search a", Results(given))


def test_experiments_are_listed_with_runs_hardware_and_times(results: Results) -> None:
    head, _, other, shared = run_query("experiments", results).splitlines()
    assert head.startswith("| experiment | runs | hardware |")
    assert other.startswith("| [other](other) | 1 | ")
    assert "| 14 of 90, without sgd, sgdm, adam, ballistic, ewcpp, er_ace, joint, er_lr0" in shared
    seconds = sum(float(run.status.seconds) for run in results.runs("other"))
    assert f"| {seconds:.0f} s | not recorded |" in other


def test_wall_clock_counts_what_ran_at_the_same_time_once(tmp_path: Path) -> None:
    spans = {0: ("12:00:00", "12:10:00"), 1: ("12:05:00", "12:20:00"), 2: ("15:00:00", "15:01:00")}
    write_experiment(tmp_path, {"er": Made("er")}, tuple(spans), every=50)
    runs = read_runs(tmp_path)
    assert wall_clock(runs) is None, "it is not told when they ended"
    timed = [
        replace(
            run,
            environment=Environment({"started": f"2026-01-01T{spans[run.seed][0]}+00:00"}),
            status=Status({"state": "done", "ended": f"2026-01-01T{spans[run.seed][1]}+00:00"}),
        )
        for run in runs
    ]
    assert wall_clock(timed) == 21 * 60


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "there are table, curve, value"),
        ("tabel a", 'unknown "tabel"; did you mean "table"?'),
        ("value a", 'not of the form "value NAME ROW MEASURE [only=…]"'),
        ("table a row=er", 'not of the form "table NAME [rows=…] [columns=…]"'),
        ("table table1", "no experiment"),
        ("table other columns=ACCC", 'no column "ACCC"; did you mean "ACC"?'),
        ("table other rows=err", 'no finished row "err"; did you mean "er"?'),
        ("value other er acc", 'no measure "acc"; there are ACC'),
        ("value other er ACC only=sd", 'only: got "sd", expected mean'),
        ("value other best:sgd ACC", 'no finished row of the method "sgd"'),
        ("curve other", 'no finished row of "er" with an option "lr"'),
        ("curve other measure=speed", 'no measure "speed"'),
        ("paper other er ACC", "the paper has no ACC for these rows of other"),
        ("option other er lrr", 'no option "lrr"'),
        ("search other", "no search there (search/search.yaml is missing)"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_place(
    query: str, words: str, results: Results, written: Callable[[str], Path]
) -> None:
    page = written(f"# A page\n\n<!-- results: {query} -->\n<!-- end -->\n")
    with refused("page.md, line 3: ", words):
        fill(page, results)
    with refused("page.md, line 3: ", words):
        stale_blocks(page, results)


# Blocks


def test_blocks_are_filled_and_then_fresh(results: Results, written: Callable[[str], Path]) -> None:
    page = written(
        f"# A page\n\nER ends at <!-- results: value {SHARED} er ACC -->1<!-- end --> %.\n\n"
        f"<!-- results: curve {SHARED} -->\nold\n<!-- end -->\n\nThe end.\n"
    )
    first, second = stale_blocks(page, results)
    assert (first.place, second.place) == (f"{page}, line 3", f"{page}, line 5")
    assert first.query == f"value {SHARED} er ACC"
    assert first.diff.splitlines()[3:] == ["-1", "+51.0 ± 1.4"]
    assert "-old" in second.diff.splitlines()
    assert fill(page, results) == 2
    assert stale_blocks(page, results) == []
    text = page.read_text(encoding="utf-8")
    assert f"ER ends at <!-- results: value {SHARED} er ACC -->51.0 ± 1.4<!-- end --> %.\n" in text
    curve = run_query(f"curve {SHARED}", results)
    assert text.endswith(f" -->\n\n{curve}\n<!-- end -->\n\nThe end.\n")
    assert fill(page, results) == 2
    assert page.read_text(encoding="utf-8") == text


def test_windows_newlines_stay_as_they_are(results: Results, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A page\r\n\r\n<!-- results: runs other -->\r\n<!-- end -->\r\n"
    page.write_bytes(text.encode())
    fill(page, results)
    assert page.read_bytes().decode() == text.replace(
        "-->\r\n<!-- end", "-->\r\n\r\n1\r\n\r\n<!-- end"
    )
    assert stale_blocks(page, results) == []


def test_a_digit_that_somebody_changed_is_found(
    results: Results, written: Callable[[str], Path]
) -> None:
    page = written(f"<!-- results: table {SHARED} -->\n<!-- end -->\n")
    fill(page, results)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("51.00 ± 1.41", "51.00 ± 1.31"), encoding="utf-8")
    (found,) = stale_blocks(page, results)
    assert [line[0] for line in found.diff.splitlines() if "51.00 ±" in line] == ["-", "+"]


def test_code_and_other_comments_are_left_alone(
    results: Results, written: Callable[[str], Path]
) -> None:
    text = (
        "<!-- a comment -->\n\n```md\n<!-- results: nonsense -->\n<!-- end -->\n```\n\n"
        "~~~~\n```\n<!-- results: nonsense -->\n~~~~\n\n<!-- ending -->\n"
    )
    page = written(text)
    assert fill(page, results) == 0
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n\n<!-- results: runs other -->\n", "line 3: the block has no <!-- end -->"),
        (
            "<!-- results: runs other -->\n\n<!-- results: runs other -->\n<!-- end -->\n",
            "line 3: a block begins within another",
        ),
        ("<!-- results: runs other -->1<!-- end -->\n", "line 1: a line that begins with a"),
        ("- <!-- results: runs other -->1<!-- end -->\n", "line 1: a line that begins with a"),
        ("a\n> 1. <!-- results: runs other -->1<!-- end -->\n", "line 2: a line that begins"),
        ("a\n\nb 1<!-- end -->\n", "page.md, line 3: <!-- end --> without a beginning"),
        ("a <!-- value other er ACC -->1<!-- end -->\n", "line 1: <!-- end --> without a beg"),
        (
            "a\nb <!-- result: runs other -->1<!-- end -->\n",
            'line 2: a block begins with "results:"',
        ),
        ("a <!-- Results: runs other -->1<!-- end -->\n", 'not "Results:"'),
        ("a <!--results : runs other -->\n", 'not "results :"'),
    ],
)
def test_marks_that_no_reader_would_get_right_are_refused(
    text: str, words: str, results: Results, written: Callable[[str], Path]
) -> None:
    with refused(words):
        fill(written(text), results)
    with refused(words):
        stale_blocks(written(text), results)


# The commands


def test_check_changes_nothing_and_fails_with_a_diff(
    results: Results, written: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    page = written("There are <!-- results: runs other -->7<!-- end --> runs.\n")
    before = page.read_bytes()
    command = ("fill", page, "--results", results.folder)
    code, printed, _ = called(capsys, *command, "--check")
    assert code == 1
    assert f"{page}, line 1: not what {results.folder} gives: runs other\n" in printed
    assert "-7\n+1\n" in printed
    assert page.read_bytes() == before
    assert called(capsys, *command)[0] == 0
    assert called(capsys, *command, "--check") == (0, "", "")
    assert page.read_text() == "There are <!-- results: runs other -->1<!-- end --> runs.\n"


def test_documents_and_results_that_are_not_there(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = called(capsys, "fill", tmp_path / "no.md", "--results", results.folder)
    assert (code, said) == (
        2,
        f"syngap: {tmp_path}/no.md: cannot be read (No such file or directory)\n",
    )
    (tmp_path / "a.md").write_text("<!-- results: table digits -->\n<!-- end -->\n")
    code, _, said = called(capsys, "fill", tmp_path / "a.md", "--results", tmp_path / "none")
    assert code == 2
    assert "none: no such folder; --results gives another" in said


def test_a_folder_of_results_is_reported_experiment_by_experiment(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = called(capsys, "report", results.folder, "--markdown")
    assert code == 0
    assert re.findall(r"^## (.+)$", printed, re.MULTILINE) == ["other", SHARED]
    assert printed.count("| method ") == 2
    for name in results.names():
        assert (results.folder / name / "index.html").is_file()
    code, _, said = called(capsys, "report", results.folder, "--figure", "a.svg")
    assert code == 2
    assert "holds several experiments" in said


def test_a_search_among_results_is_left_out_of_their_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_experiment(tmp_path / name, {"er": Made("er")}, (0,), every=50)
    (tmp_path / "b" / "search.yaml").write_text("trials: 3\n")
    code, printed, said = called(capsys, "report", tmp_path, "--markdown")
    assert code == 0
    assert re.findall(r"^## (.+)$", printed, re.MULTILINE) == ["a", "c"]
    assert f"{tmp_path / 'b'}: holds trials of a search; left out" in said.splitlines()


# The documentation of this repository

in_one_process = pytest.mark.xdist_group("results")  # which reads them once


@pytest.fixture(scope="module")
def known() -> Results:
    """What the repository records."""
    if not (ROOT / "results").is_dir():
        pytest.skip("there are no results beside the tests")
    return Results(ROOT / "results")


@pytest.mark.slow
@in_one_process
def test_the_numbers_of_this_repository_are_those_of_its_results(known: Results) -> None:
    """What `make check-results` does, so that `make test` knows it too."""
    documents = [ROOT / "README.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [found for document in documents for found in stale_blocks(document, known)] == []
    assert sum(len(re.findall("<!-- results:", doc.read_text("utf-8"))) for doc in documents) >= 5
    makefile = (ROOT / "Makefile").read_text()
    assert "DOCUMENTS = README.md results/README.md docs/*.md\n" in makefile
    assert "make check-results\n" in (ROOT / ".ci" / "run").read_text()


@in_one_process
def test_what_is_recorded_agrees_with_itself(known: Results) -> None:
    """The last line of R is what the last evaluation found, in every run."""
    for name in known.names():
        for run in known.runs(name):
            if run.done and run.record:
                last = run.record[-1].accuracy
                assert accuracy(run.accuracy) == pytest.approx(sum(last) / len(last)), run.path


@in_one_process
def test_what_was_run_is_what_the_experiment_beside_it_says(known: Results) -> None:
    """Every run has a row and a seed of experiment.yaml, and all that both say is the same."""
    for name in known.names():
        asked = read_yaml(known.folder / name / "experiment.yaml")
        runs = known.runs(name)
        rows, seeds = ({getattr(run, key) for run in runs} for key in ("family", "seed"))
        assert (rows, seeds) == (set(asked["methods"]), set(asked["seeds"])), name
        is_stream = "stream" in asked
        for run in runs:
            method = dict(asked["methods"][run.family])
            method = {"name": method.pop("method"), **method}
            recorded = run.config.method.as_mapping()
            if is_stream:
                assert complete_method(recorded) == complete_method(method), run.path
            else:  # of a list each trial has one value
                assert recorded.keys() == method.keys(), run.path
                for option, value in recorded.items():
                    listed = method[option]
                    assert value in (listed if isinstance(listed, list) else [listed]), run.path
            source = next(part for part in ("stream", *TASKS) if part in asked)
            for part in (source, "model"):  # options may come later
                assert run.config.entries[part].items() <= asked[part].items(), run.path


@in_one_process
def test_what_was_chosen_is_the_best_of_the_trials_and_is_in_the_table(known: Results) -> None:
    found = {name: search for name in known.names() if (search := known.search(name))}
    for name, search in found.items():
        folder = known.folder / name / "search"
        with (folder / "trials.csv").open(newline="") as file:
            trials = list(csv.DictReader(file))
        for row, chosen in read_yaml(folder / "search.yaml")["chosen"].items():
            own = [trial for trial in trials if trial["row"] == row]
            most = max(len(trial["seeds"].split()) for trial in own)  # of the last round
            own = [trial for trial in own if len(trial["seeds"].split()) == most]
            assert max(float(trial["ACC"]) for trial in own) == chosen["ACC"], (name, row)
            ties = [trial for trial in own if float(trial["ACC"]) == chosen["ACC"]]
            best = next((one for one in ties if one["trial"] == str(chosen.get("trial"))), ties[0])
            for option, value in chosen["values"].items():
                assert float(best[option]) == value, (name, row)
        assert len({row.trials for row in search.rows}) == 1, "the same number for every row"
        assert all(row.used for row in search.rows), name


@pytest.mark.slow
@in_one_process
def test_the_figures_of_the_documentation_are_those_of_the_results(
    known: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes, where matplotlib is the version that drew them."""
    newest = re.findall(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if version("matplotlib") != newest[-1]:
        pytest.skip("a matplotlib that draws other bytes")
    accuracy_figure(known.runs("digits"), tmp_path / "demo.svg")
    landscapes = read_landscapes(ROOT / "results" / "digits")
    landscape_figure(landscapes, tmp_path / "landscape-digits.svg")
    shared = "table1-cifar100-shared"
    landscapes = read_landscapes(ROOT / "results" / shared)
    monkeypatch.setattr(figures, "FORMATS", ("svg",))  # the documentation shows no PDF
    written, _ = every_figure(known.runs(shared), landscapes, tmp_path)
    frontier = tmp_path / "frontier.svg"
    script = ROOT / "benchmarks" / "frontier.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(frontier)])
    runpy.run_path(str(script), run_name="__main__")
    growth.draw(ROOT / "results" / "speed" / "cpu" / "growth.md", tmp_path / "growth.svg")
    smollm2 = tmp_path / "smollm2.svg"
    frontier_figure(compare_methods(known.runs("finetune-smollm2")), smollm2)
    drawn = [frontier, smollm2]
    drawn += [tmp_path / name for name in ("demo.svg", "landscape-digits.svg", "growth.svg")]
    shown = [path for path in written if (ROOT / "docs" / "figures" / path.name).exists()]
    assert len(shown) >= 5
    for path in (*drawn, *shown):
        there = ROOT / "docs" / ("" if path.stem == "demo" else "figures") / path.name
        assert path.read_bytes() == there.read_bytes(), f"`make results` draws {there} again"


@in_one_process
def test_the_documentation_shows_what_reproduce_says_of_the_results(known: Results) -> None:
    """Where the same runs come out again."""
    recorded = known.runs("digits")
    again = [run for run in recorded if (run.row, run.seed) == ("er", 0)]
    (er,) = reproductions(recorded, again)
    assert "\n".join(describe(er)) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_kind_is_explained() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for kind in QUERIES:
        assert f"`{kind}" in text, kind
