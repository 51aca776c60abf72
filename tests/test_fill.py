"""Documents say what results say: blocks are filled from them, and a stale one is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from refused import refused
from runfolders import Made, write_experiment, write_run
from tiny import called

from syngap.experiments.folder import read_runs
from syngap.metrics import accuracy
from syngap.report import paper
from syngap.report.asked import ASKED, answer
from syngap.report.blocks import fill, stale
from syngap.report.overview import wall_clock
from syngap.report.results import Results

ROOT = Path(__file__).resolve().parents[1]
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


# What can be asked


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("value er ACC", "51.0 ± 1.4"),
        ("value er ACC only=mean", "51.0"),
        ("value best:er ACC", "51.0 ± 1.4"),
        ("value best:syngap ACC only=mean", "72.5"),
        ("difference syngap er ACC only=mean", "+9.0"),
        ("difference syngap er ACC", "+9.0 (95 % interval −3.7 to +21.7)"),  # 12.706 · 1.414 / √2
        ("difference er syngap ACC only=mean", "−9.0"),
        ("difference best:syngap best:er ACC only=mean", "+21.5"),
        ("option best:syngap lr", "1.0"),
        ("paper syngap ACC", "27.28 ± 0.58"),
        ("paper syngap ACC less=er", "+9.7"),
        ("runs", "14 of 90"),
    ],
)
def test_single_numbers(asked: str, said: str, results: Results) -> None:
    kind, *rest = asked.split()
    assert answer(" ".join([kind, SHARED, *rest]), results) == said


def test_numbers_over_fewer_seeds_say_so(tmp_path: Path) -> None:
    made = {"er": Made("er"), "sgd": Made("sgd")}
    write_experiment(tmp_path / "a", made, (0, 1, 2), every=50)
    write_run(tmp_path / "a", "sgd", made["sgd"], 1, state="failed", tasks_done=1)
    found = Results(tmp_path)
    assert answer("value a sgd ACC", found).endswith(" (2 of 3 seeds)")
    assert answer("difference a er sgd ACC", found).endswith(", 2 of 3 seeds)")
    assert "seeds" not in answer("value a er ACC", found)


def test_a_curve_has_the_rows_that_differ_in_nothing_else(results: Results) -> None:
    head, _, er, syngap = answer(f"curve {SHARED}", results).splitlines()
    assert head == "| ACC ↑ by lr | 0.01 | 0.3 | 1.0 |"
    assert er == "| ER | 42.0 ± 2.8 | **51.0 ± 1.4** | – |"
    assert syngap == "| SynGAP | 30.0 ± 0.0 | 60.0 ± 2.8 | **72.5 ± 3.5** |"


def test_a_table_can_have_some_rows_and_columns(results: Results) -> None:
    text = answer(f"table {SHARED} rows=derpp,syngap columns=ACC,ACC-ER", results)
    lines = text.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["DER++", "SynGAP"]
    assert lines[0].split() == ["|", "method", "|", "ACC", "↑", "|", "ACC", "-", "ER", "|"]
    assert "+9.00" in lines[3], "against ER, which is not in the table"
    assert "`syngap report results/table1-cifar100-shared`" in text
    assert "paper" not in text
    for note in paper.notes(SHARED):
        assert note in answer(f"table {SHARED}", results)
        assert note in answer(f"notes {SHARED}", results)


def test_experiments_are_listed_with_runs_hardware_and_times(results: Results) -> None:
    head, _, other, shared = answer("experiments", results).splitlines()
    assert head.startswith("| experiment | runs | hardware |")
    assert other.startswith("| [other](other) | 1 | ")
    assert "| 14 of 90, without sgd, sgdm, adam, ballistic, ewcpp, er_ace, joint, er_lr0" in shared
    seconds = sum(float(run.status["seconds"]) for run in results.runs("other"))
    assert f"| {seconds:.0f} s | not recorded |" in other


def test_wall_clock_counts_what_ran_at_the_same_time_once(tmp_path: Path) -> None:
    spans = {0: ("12:00:00", "12:10:00"), 1: ("12:05:00", "12:20:00"), 2: ("15:00:00", "15:01:00")}
    write_experiment(tmp_path, {"er": Made("er")}, tuple(spans), every=50)
    runs = read_runs(tmp_path)
    assert wall_clock(runs) is None, "it is not told when they ended"
    for run in runs:
        begun, ended = spans[run.seed]
        run.environment["started"] = f"2026-01-01T{begun}+00:00"
        run.status["ended"] = f"2026-01-01T{ended}+00:00"
    assert wall_clock(runs) == 21 * 60


@pytest.mark.parametrize(
    ("asked", "words"),
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
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_place(
    asked: str, words: str, results: Results, written: Callable[[str], Path]
) -> None:
    page = written(f"# A page\n\n<!-- results: {asked} -->\n<!-- end -->\n")
    with refused("page.md, line 3: ", words):
        fill(page, results)
    with refused("page.md, line 3: ", words):
        stale(page, results)


# Blocks


def test_blocks_are_filled_and_then_fresh(results: Results, written: Callable[[str], Path]) -> None:
    page = written(
        f"# A page\n\nER ends at <!-- results: value {SHARED} er ACC -->1<!-- end --> %.\n\n"
        f"<!-- results: curve {SHARED} -->\nold\n<!-- end -->\n\nThe end.\n"
    )
    first, second = stale(page, results)
    assert (first.place, second.place) == (f"{page}, line 3", f"{page}, line 5")
    assert first.asked == f"value {SHARED} er ACC"
    assert first.diff.splitlines()[3:] == ["-1", "+51.0 ± 1.4"]
    assert "-old" in second.diff.splitlines()
    assert fill(page, results) == 2
    assert stale(page, results) == []
    text = page.read_text(encoding="utf-8")
    assert f"ER ends at <!-- results: value {SHARED} er ACC -->51.0 ± 1.4<!-- end --> %.\n" in text
    curve = answer(f"curve {SHARED}", results)
    assert text.endswith(f" -->\n\n{curve}\n<!-- end -->\n\nThe end.\n")
    assert fill(page, results) == 2
    assert page.read_text(encoding="utf-8") == text


def test_a_digit_that_somebody_changed_is_found(
    results: Results, written: Callable[[str], Path]
) -> None:
    page = written(f"<!-- results: table {SHARED} -->\n<!-- end -->\n")
    fill(page, results)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("51.00 ± 1.41", "51.00 ± 1.31"), encoding="utf-8")
    (found,) = stale(page, results)
    assert [line[0] for line in found.diff.splitlines() if "51.00 ±" in line] == ["-", "+"]


def test_code_and_other_comments_are_left_alone(
    results: Results, written: Callable[[str], Path]
) -> None:
    text = (
        "<!-- a comment -->\n\n```md\n<!-- results: nonsense -->\n<!-- end -->\n```\n\n"
        "~~~~\n```\n<!-- results: nonsense -->\n~~~~\n\n<!-- end -->\n"
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
    ],
)
def test_marks_that_no_reader_would_get_right_are_refused(
    text: str, words: str, results: Results, written: Callable[[str], Path]
) -> None:
    with refused(words):
        fill(written(text), results)


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
    assert 'none: no experiment "digits"; there are none' in said


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


# The documentation of this repository


def test_the_numbers_of_this_repository_are_those_of_its_results() -> None:
    """What `make check-results` does, so that `make test` knows it too."""
    if not (ROOT / "results").is_dir():
        pytest.skip("there are no results beside the tests")
    known = Results(ROOT / "results")
    documents = [ROOT / "README.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [found for document in documents for found in stale(document, known)] == []
    assert sum(len(re.findall("<!-- results:", doc.read_text("utf-8"))) for doc in documents) >= 5
    makefile = (ROOT / "Makefile").read_text()
    assert "DOCUMENTS = README.md results/README.md docs/*.md\n" in makefile
    assert "make check-results\n" in (ROOT / ".ci" / "run").read_text()


def test_what_is_recorded_agrees_with_itself() -> None:
    """The last line of R is what the last evaluation found, in every run."""
    if not (ROOT / "results").is_dir():
        pytest.skip("there are no results beside the tests")
    known = Results(ROOT / "results")
    for name in known.names():
        for run in known.runs(name):
            if run.done and run.record:
                last = run.record[-1].accuracy
                assert accuracy(run.accuracy) == pytest.approx(sum(last) / len(last)), run.path


def test_every_kind_is_explained() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    for kind in ASKED:
        assert f"`{kind}" in text, kind
