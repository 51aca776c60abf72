"""Reports say what the run folders say: all of it, and whichever way it went."""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import datetime, timezone

import pytest
from checkout import ROOT
from rich.console import Console
from runfolders import DEMO, Made, write_experiment, write_run, write_search
from tiny import called, tree

from syngap.bench.errors import UserError
from syngap.bench.reporting.figures import accuracy_figure
from syngap.bench.reporting.headline import (
    compare,
    conclusion,
    featured,
    headline,
    remarks,
    rivals,
    subject,
)
from syngap.bench.reporting.page import embed_json, page, page_data, write_page
from syngap.bench.reporting.rows import MEASURES, omissions, rows
from syngap.bench.reporting.series import accuracy_curve, boundaries, plasticity_curve
from syngap.bench.reporting.tables import best_rows, markdown, table
from syngap.bench.store.folder_reader import read_run, read_runs
from syngap.bench.store.records import alone_in

NOON = datetime(2025, 11, 15, 12, tzinfo=timezone.utc)


def experiment(folder, ends, seconds=None):
    """Write two-task runs: row → by seed the accuracy on both tasks in the end, and return them."""
    write_experiment(folder, {}, ())
    for row, seeds in ends.items():
        for seed, (first, second) in enumerate(seeds):
            method = Made(row.split()[0], seconds=(seconds or {}).get(row, 10.0))
            R = [[first, second]] if method.name == "joint" else [[90, 0], [first, second]]
            write_run(folder, row, method, seed, R=R, every=50)
    (folder / "experiment.yaml").write_text(json.dumps({"methods": dict.fromkeys(ends)}))
    return read_runs(folder)


def shown(rows, width=80):
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(table(rows, width))
    return captured.get()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return read_runs(write_experiment(tmp_path_factory.mktemp("demo"), every=20))


# Rows


def test_row_is_mean_and_sd_over_seeds(tmp_path):
    (row,) = rows(experiment(tmp_path, {"er": [(50, 80), (60, 90), (70, 100)]}))
    assert row.spread("ACC")[:2] == (75, 10)
    assert row.spread("FM")[:2] == (30, 10)
    assert row.spread("BWT")[:2] == (-30, 10)
    assert row.seeds == (0, 1, 2)


def test_one_seed_has_no_spread(tmp_path):
    (row,) = rows(experiment(tmp_path, {"er": [(50, 80)]}))
    assert row.spread("ACC")[:2] == (65, None)


def test_intransigence_is_against_the_joint_run_of_the_same_seed(tmp_path):
    runs = experiment(tmp_path, {"er": [(50, 80), (50, 80)], "joint": [(95, 85), (99, 91)]})
    er, joint = rows(runs)
    assert er.values["INT"] == {0: 5, 1: 10}
    assert joint.joint
    assert joint.spread("ACC")[:2] == (92.5, pytest.approx(3.5355, abs=1e-4))
    assert all(joint.spread(name) is None for name in MEASURES if name not in ("ACC", "seconds"))


def test_intransigence_is_unknown_without_joint_run(tmp_path):
    (row,) = rows(experiment(tmp_path, {"er": [(50, 80)]}))
    assert row.spread("INT") is None
    assert omissions([row]) == []


def test_missing_joint_seed_is_named(tmp_path):
    er, joint = rows(experiment(tmp_path, {"er": [(50, 80), (50, 80)], "joint": [(95, 85)]}))
    assert er.values["INT"] == {0: 5}
    assert omissions([er, joint]) == [
        "Joint, seed 1: not begun",
        "INT, seed 1, for want of its joint run: ER",
    ]


def test_joint_comes_last_and_the_others_in_the_order_of_the_experiment(demo):
    names = [row.name for row in rows(demo)]
    assert names == list(DEMO)
    assert [row.name for row in rows(demo[::-1])][-1] == "joint"


def test_every_run_is_counted_or_named(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"], "sgd": DEMO["sgd"]}, every=50)
    write_run(tmp_path, "er", DEMO["er"], 1, state="running", tasks_done=2)
    error = "Traceback (most recent call last):\n  ...\nRuntimeError: out of memory"
    write_run(tmp_path, "sgd", DEMO["sgd"], 0, state="failed", tasks_done=1, error=error)
    shutil.rmtree(tmp_path / "sgd-2")
    er, sgd = rows(read_runs(tmp_path))
    assert (er.seeds, sgd.seeds) == ((0, 2), (1,))
    assert omissions([er, sgd]) == [
        "ER, seed 1: stopped at step 200 of 500",
        "SGD, seed 0: failed at step 100 of 500: RuntimeError: out of memory",
        "SGD, seed 2: not begun",
    ]
    for text in (shown([er, sgd]), markdown([er, sgd])):
        assert "RuntimeError: out of memory" in " ".join(text.split())
        assert "SGD (1 of 3 seeds)" in text


@pytest.mark.skipif(os.name != "posix", reason="the lock needs fcntl")
def test_a_run_is_running_while_a_process_is_at_it(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"]}, (0,), every=50)
    folder = write_run(tmp_path, "er", DEMO["er"], 0, state="running", tasks_done=2)
    with alone_in(folder):
        assert omissions(rows(read_runs(tmp_path))) == ["ER, seed 0: running at step 200 of 500"]
    assert omissions(rows(read_runs(tmp_path))) == ["ER, seed 0: stopped at step 200 of 500"]


def test_what_the_experiment_asks_for_and_nobody_began_is_counted(tmp_path):
    made = {row: DEMO[row] for row in ("sgd", "er", "syngap", "joint")}
    write_experiment(tmp_path, made, (0, 1, 2), every=50)
    for run in [path for path in tmp_path.iterdir() if path.is_dir()]:
        if run.name not in ("er-0", "syngap-0"):
            shutil.rmtree(run)
    runs = read_runs(tmp_path)
    found = rows(runs)
    assert [row.name for row in found] == list(made)
    counts = [row.seed_note().split()[0] for row in found]
    assert counts == ["0", "1", "1", "0"]
    assert found[-1].joint
    assert omissions(found)[:2] == ["SGD, seeds 0, 1, 2: not begun", "ER, seeds 1, 2: not begun"]
    assert "ER (1 of 3 seeds)" in shown(found)
    assert "SGD (0 of 3 seeds)" in markdown(found)
    assert "Joint, seeds 0, 1, 2: not begun" in page(runs, "begun", timestamp=NOON)


@pytest.mark.parametrize("plan", ["methods: [er]", "methods: {er: 3}", "seeds: x", "seeds: 3"])
def test_damaged_plan_is_named(tmp_path, plan):
    write_run(tmp_path, "er", DEMO["er"], 0, every=50)
    (tmp_path / "experiment.yaml").write_text(plan)
    with pytest.raises(UserError, match=r"experiment\.yaml: not as syngap wrote it"):
        read_runs(tmp_path)


def test_runs_that_diverged_are_counted_as_a_result(tmp_path):
    made = {row: DEMO[row] for row in ("er", "sgd", "syngap")}
    write_experiment(tmp_path, made, every=50)
    error = "FloatingPointError: the loss is not finite"
    for row, seed in (("er", 1), ("sgd", 0), ("sgd", 1), ("sgd", 2)):
        write_run(tmp_path, row, made[row], seed, state="failed", tasks_done=1, error=error)
    found = rows(read_runs(tmp_path))
    assert [row.divergences for row in found] == [1, 3, 0]
    assert [row.seed_note() for row in found] == [
        "2 of 3 seeds, 1 diverged",
        "0 of 3 seeds, 3 diverged",
        "",
    ]
    assert "SGD (0 of 3 seeds, 3 diverged)" in markdown(found)
    assert "SGD diverged with every seed." in headline(found)
    assert "ER diverged" not in headline(found)


def test_damaged_folder_is_named(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"]}, (0,), every=50)
    (tmp_path / "er-0" / "accuracy.csv").write_text("after,task_1,task_2\n")
    with pytest.raises(UserError, match="er-0"):
        rows(read_runs(tmp_path))


# Tables


def test_table_fits_a_narrow_terminal_and_a_pipe(demo):
    lines = shown(rows(demo)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    sgd = next(line for line in lines if line.strip().startswith("SGD "))
    assert len(re.findall(r"\d+\.\d+ ± +\d+\.\d+", sgd)) == 4


def test_points_of_a_column_stand_under_each_other(demo):
    lines = [line for line in shown(rows(demo)).splitlines() if re.search(r"\d ± ", line)]
    assert len({line.index(".") for line in lines}) == 1
    assert len({line.index("±") for line in lines}) == 1


def test_best_of_each_column_is_marked_and_joint_is_no_rival(tmp_path):
    ends = {"er": [(50, 80)], "sgd": [(0, 90)], "joint": [(99, 99)]}
    found = rows(experiment(tmp_path, ends, seconds={"sgd": 5.0, "joint": 1.0}))
    assert best_rows(found, "ACC") == best_rows(found, "FM") == {"er"}
    assert best_rows(found, "seconds") == best_rows(found, "INT") == {"sgd"}
    assert "65.00*" in shown(found)
    assert "**65.00**" in markdown(found)
    assert markdown(found).splitlines()[4].startswith("| Joint")


def test_nothing_is_best_where_all_are_equal(tmp_path):
    found = rows(experiment(tmp_path, {"er": [(50, 80)], "sgd": [(50, 80)]}))
    assert best_rows(found, "ACC") == set()


def test_markdown_is_a_table(demo):
    lines = [line for line in markdown(rows(demo)).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(DEMO)
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {7}


def test_names_are_text_in_tables(tmp_path):
    found = rows(experiment(tmp_path, {"er": [(50, 80)], "er [red]a|b": [(50, 80)]}))
    assert "ER (er [red]a|b)" in shown(found)
    assert r"ER (er [red]a\|b)" in markdown(found)


# Headline


def ends(folder, rows_at, seeds=(0, 1, 2, 3)):
    """Write rows of ER and of other methods: row → (method, options, mean ACC)."""
    made = {row: Made(method, options=options) for row, (method, options, _) in rows_at.items()}
    write_experiment(folder, made, ())
    for row, (_, _, mean) in rows_at.items():
        for seed in seeds:
            end = mean + 5 * seed + 0.1 * len(row) * seed  # seeds differ far more than pairs do
            write_run(folder, row, made[row], seed, R=[[90, 0], [end, end]], every=50)
    return folder


def test_a_tuned_row_below_an_untuned_one_is_said_in_one_line(tmp_path, capsys):
    """By the paired interval over common seeds: seeds differ more than the two rows."""
    tuned = {"er": ("er", {"lr": 0.03}, 40), "derpp": ("derpp", {"lr": 0.03}, 50)}
    default = {"er_default": ("er", {}, 43), "derpp_default": ("derpp", {}, 45)}
    made = tuned | default
    folder = ends(tmp_path / "a", made)
    assert "Tuned rows" not in "".join(called(capsys, "report", folder)[1:]), "no search: not tuned"
    write_search(folder, {"er": {"lr": 0.03}, "derpp": {"lr": 0.03}})
    _, _, said = called(capsys, "report", folder)
    (line,) = [line for line in said.splitlines() if line.startswith("Tuned rows end below")]
    assert "points, 95 %) below ER (lr 0.1" in line
    assert "DER++" not in line, "which ends above"
    assert line in (folder / "index.html").read_text(encoding="utf-8")
    plan = {"stream": "digits", "model": "mlp", "methods": {row: {"method": "er"} for row in made}}
    (folder / "experiment.yaml").write_text(json.dumps(plan))
    assert line in called(capsys, "keep", folder, tmp_path / "kept")[2].splitlines()
    level = ends(tmp_path / "b", {**tuned, "er_default": ("er", {}, 39.5)})
    write_search(level, {"er": {"lr": 0.03}})
    assert "Tuned rows" not in "".join(called(capsys, "report", level)[1:])
    few = ends(tmp_path / "c", tuned | default, seeds=(0, 1))
    write_search(few, {"er": {"lr": 0.03}})
    assert "Tuned rows" not in "".join(called(capsys, "report", few)[1:]), "too few for an interval"


def test_untuned_rows_may_be_in_another_folder(tmp_path, capsys):
    tuned = ends(tmp_path / "a", {"er": ("er", {"lr": 0.03}, 40), "sgd": ("sgd", {"lr": 1.0}, 30)})
    untuned = ends(tmp_path / "b", {"er": ("er", {"lr": 0.3}, 45), "sgd": ("sgd", {}, 20)})
    _, _, said = called(capsys, "report", tuned, "--against", untuned)
    assert said.startswith("Tuned rows end below untuned ones by more than chance: ER (−5.0 ± ")
    assert "SGD" not in said
    assert called(capsys, "report", untuned, "--against", untuned)[2] == ""
    code, _, said = called(capsys, "report", tmp_path, "--against", untuned)
    assert (code, "--against: " in said, len(said.splitlines())) == (2, True, 1)


def test_a_tuned_row_below_an_untuned_one_fails_the_check(tmp_path, capsys):
    """Of all results: against what has the same stream and model, and no search of its own."""

    def check(*arguments):
        before = tree(tmp_path)
        code, printed, said = called(capsys, "report", *arguments, "--check")
        assert (said, tree(tmp_path)) == ("", before), "nothing is written"
        return code, printed

    tuned = ends(tmp_path / "a", {"er": ("er", {"lr": 0.03}, 40), "sgd": ("sgd", {"lr": 1.0}, 30)})
    write_search(tuned, {"er": {"lr": 0.03}, "sgd": {"lr": 1.0}})
    passes = (
        "a: 2 tuned rows, 0 with an untuned one to compare: none ends below by more than chance"
    )
    assert check(tmp_path) == (0, f"{passes}\n")
    untuned = ends(tmp_path / "b", {"er": ("er", {"lr": 0.3}, 45), "sgd": ("sgd", {}, 20)})
    code, printed = check(tmp_path)
    assert code == 1
    assert printed.startswith("a: er: ER (−5.0 ± ")
    assert printed.endswith("(the search has failed for this row)\n")
    assert "SGD" not in printed
    assert check(tuned, "--against", untuned) == (code, printed)
    assert check(tuned)[0] == 0, "there is no untuned row beside it"
    known = tmp_path / "known_failures.yaml"
    known.write_text("a: {er: an old search}")
    code, printed = check(tmp_path)
    assert (code, printed.endswith("(known: an old search)\n")) == (0, True)
    for stale in ("a: {er: an old search, sgd: too}", "{a: {er: an old search}, c: {sgd: too}}"):
        known.write_text(stale)
        code, printed = check(tmp_path)
        line = "sgd: no longer below an untuned row; remove it from known_failures.yaml"
        assert (code, line in printed) == (1, True)
    known.unlink()
    for path in untuned.glob("*/config.yaml"):
        path.write_text(path.read_text().replace("digits", "permuted_digits"))
    assert check(tmp_path) == (0, f"{passes}\n"), "another stream is no comparison"


def test_what_is_recorded_passes_but_for_known_failures(capsys):
    """What `make check-results` does, so that `make test` knows it too."""
    if not (ROOT / "results").is_dir():
        pytest.skip("there are no results beside the tests")
    code, printed, _ = called(capsys, "report", ROOT / "results", "--check")
    assert code == 0, printed
    assert '"$(BIN)/syngap" report results --check' in (ROOT / "Makefile").read_text()


WINS = {
    "syngap": [(70, 80), (72, 81), (69, 82)],
    "er": [(60, 80), (61, 80), (60, 81)],
    "sgd": [(0, 90), (1, 91), (0, 92)],
}
LOSES = {
    "derpp": [(88, 80), (87, 80), (88, 80)],
    "syngap": [(40, 80), (41, 80), (40, 80)],
    "er": [(60, 80), (60, 80), (60, 80)],
    "sgd": [(0, 90), (1, 90), (0, 90)],
}


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (WINS, "SynGAP (75.7 %) is most accurate, significantly ahead of ER (70.3 %)."),
        (LOSES, "DER++ (83.8 %) is most accurate; SynGAP (60.2 %) is less accurate than ER."),
        (
            {**LOSES, "er": [(41, 80), (40, 79), (40, 80)]},
            "DER++ (83.8 %) is most accurate; SynGAP (60.2 %) and ER do not differ significantly.",
        ),
        (
            {**LOSES, "er": [(20, 80), (20, 79), (20, 80)]},
            "DER++ (83.8 %) is most accurate; SynGAP (60.2 %) is more accurate than ER.",
        ),
        (
            {"syngap": [(60, 80), (66, 80), (60, 84)], "er": [(62, 84), (62, 80), (62, 81)]},
            "ER (71.8 %) is most accurate, but SynGAP (71.7 %) does not differ significantly "
            "from it.",
        ),
        (  # before another method, not before another row of its own
            {**WINS, "syngap 2": [(70, 79), (72, 80), (69, 81)]},
            "SynGAP (75.7 %) is most accurate, significantly ahead of ER (70.3 %).",
        ),
        (
            {"er": [(60, 80), (61, 80)], "syngap": [(50, 80), (50, 81)]},
            "ER (70.2 %) is most accurate, before SynGAP (65.2 %); too few seeds for a test.",
        ),
        (
            {row: LOSES[row] for row in ("derpp", "er", "sgd")},
            "DER++ (83.8 %) is most accurate, significantly ahead of ER (70.0 %).",
        ),
        (
            {"syngap": [(70, 80)] * 3 + [(0, 0)] * 3, "er": [(60, 80), (61, 80), (60, 80)]},
            "ER (70.2 %) is most accurate, but less accurate than SynGAP (37.5 %) "
            "on the seeds that both have finished.",
        ),
    ],
)  # fmt: skip
def test_conclusion_says_who_is_most_accurate_and_where_syngap_stands(tmp_path, ends, said):
    found = rows(experiment(tmp_path, {**ends, "joint": [(99, 99)] * 3}))
    assert conclusion(found) == said
    assert headline(found).startswith(said)


def test_conclusion_names_two_options_at_most(tmp_path):
    options = {"lr": 0.3, "buffer": 100, "momentum": 0.9}
    made = {
        "er": Made("er", options={"lr": 0.1, "buffer": 200, "momentum": 0.0}),
        "er_other": Made("er", keeps=0.9, options=options),
    }
    said = conclusion(rows(read_runs(write_experiment(tmp_path, made, every=50))))
    assert re.match(r"ER \(lr 0\.3, buffer 100, …; \d\d\.\d %\) is most accurate, ", said)


@pytest.mark.parametrize("short", ["syngap", "er", "both", None])
def test_times_below_a_second_are_not_compared(tmp_path, short):
    seconds = {row: 0.5 if short in (row, "both") else 2.0 for row in ("syngap", "er")}
    ours, theirs = (
        row
        for name in ("syngap", "er")
        for row in rows(experiment(tmp_path, WINS, seconds=seconds))
        if row.name == name
    )
    assert (compare(ours, theirs).time is None) == (short is not None)
    assert ("training time" in headline([ours, theirs])) == (short is None)


def test_headline_when_it_wins(tmp_path):
    said = headline(rows(experiment(tmp_path, WINS, seconds={"syngap": 18.0})))
    assert (  # 4.303 · 1.0 / sqrt(3) = 2.5
        "SynGAP forgets less than ER (−10.0 ± 2.5 points, 95 %) and SGD (−70.0 ± 2.5). "
    ) in said
    assert "It ends more accurate than ER (" in said
    assert re.search(r"1\.[789]\u00a0× that of ER and 1\.[789]\u00a0× that of SGD\.$", said)


def test_headline_says_who_has_no_memory_and_another_rate(tmp_path, demo):
    rates = "Learning rates differ: SynGAP 0.3, ER 0.1, SGD 0.1 and DER++ 0.1."
    assert remarks(rows(demo)) == ["SynGAP has a memory; SGD has none.", rates]
    assert " ".join(remarks(rows(demo))) in headline(rows(demo))
    one = headline(rows([run for run in demo if run.seed == 0]))
    assert "; too few seeds for a test. " in one
    assert one.endswith(rates)
    made = {row: Made(row, options={"lr": 0.1}) for row in ("syngap", "er", "sgd")}
    said = headline(rows(read_runs(write_experiment(tmp_path / "alike", made, every=50))))
    assert "memory" not in said
    assert "rates" not in said
    made["er_high"] = Made("er", keeps=0.9, options={"lr": 0.3})
    runs = read_runs(write_experiment(tmp_path / "high", made, every=50))
    rates = "Learning rates differ: SynGAP 0.1, ER 0.1, SGD 0.1 and ER (lr 0.3)."
    assert headline(rows(runs)).endswith(rates)
    assert page_data(runs, rows(runs))["flattered"], "by the choice of a row of ER"
    sizes = {"syngap": 2000, "er": 50, "sgd": 0}
    made = {row: Made(row, options={"lr": 0.1, "buffer": size}) for row, size in sizes.items()}
    unequal = rows(read_runs(write_experiment(tmp_path / "unequal", made, every=50)))
    assert remarks(unequal)[1:] == ["Memories differ: SynGAP 2000 and ER 50."]


def test_headline_when_it_is_level(tmp_path):
    ends = {"syngap": [(60, 80), (66, 80), (60, 84)], "er": [(62, 80), (62, 80), (62, 81)]}
    said = headline(rows(experiment(tmp_path, ends)))
    assert "SynGAP forgets not significantly more or less than ER (" in said
    assert "It ends not significantly above or below ER (" in said


def test_headline_when_it_loses_names_the_winner(tmp_path):
    said = re.sub(r" \([^)]*\)", "", headline(rows(experiment(tmp_path, LOSES))))
    assert "SynGAP forgets less than SGD, and more than ER and DER++." in said
    assert "It ends more accurate than SGD, and less accurate than ER and DER++." in said


@pytest.mark.parametrize("seeds", [1, 2])
def test_headline_draws_no_conclusion_from_fewer_than_three_seeds(tmp_path, seeds):
    found = rows(experiment(tmp_path, {"syngap": [(70, 80)] * seeds, "er": [(60, 80)] * seeds}))
    said = headline(found)
    assert said.startswith(
        "SynGAP (75.0 %) is most accurate, before ER (70.0 %); too few seeds for a test."
    )
    assert "more accurate" not in said
    assert "significant" not in said


def test_headline_compares_shared_seeds_only(tmp_path):
    ends = {
        "syngap": [(70, 80), (70, 81), (70, 80), (0, 0)],
        "er": [(60, 80), (61, 80), (60, 80)],
        "sgd": [(0, 90), (0, 90)],
    }
    found = rows(experiment(tmp_path, ends))
    difference = compare(subject(found), rivals(found)[0])
    assert difference.seeds == 3
    assert difference.accuracy.mean == pytest.approx(5)
    assert "Too few shared seeds to compare it with SGD." in headline(found)


def test_without_syngap_the_most_accurate_method_is_featured(tmp_path):
    found = rows(experiment(tmp_path, {row: LOSES[row] for row in ("er", "derpp", "sgd")}))
    assert subject(found) is None
    assert featured(found).name == "derpp"
    assert [row.name for row in rivals(found)] == ["er", "sgd"]
    assert "DER++ forgets less than ER (" in headline(found)


def test_headline_without_rivals(tmp_path):
    found = rows(experiment(tmp_path, {"syngap": [(60, 80), (60, 80)], "joint": [(99, 99)] * 2}))
    assert headline(found) == "SynGAP (70.0 %) is the only method that has finished."


def test_headline_with_nothing_to_compare(tmp_path):
    write_run(tmp_path, "er", DEMO["er"], 0, state="running")
    (tmp_path / "experiment.yaml").write_text("methods: {er: {}}")
    assert headline(rows(read_runs(tmp_path))) == "No run has finished yet."
    write_run(tmp_path, "joint", DEMO["joint"], 0, every=50)
    only = "Only Joint has finished: there is nothing to compare yet."
    assert headline(rows(read_runs(tmp_path))) == only


def test_headline_sets_the_best_of_several_against_the_best(tmp_path):
    ends = {
        "er 0.1": [(60, 80), (60, 81)],
        "er 0.3": [(50, 80), (50, 81)],
        "syngap 0.1": [(50, 80), (51, 81)],
        "syngap 0.3": [(55, 80), (55, 80)],
    }
    found = rows(experiment(tmp_path, ends))
    assert subject(found).name == "syngap 0.3"
    assert [row.name for row in rivals(found)] == ["er 0.1"]


# Over the stream


def test_seeds_with_tasks_of_other_lengths_are_averaged_by_place(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"]}, uneven=True, every=10)
    runs = read_runs(tmp_path)
    assert boundaries(runs[:1]) != boundaries(runs[1:2])
    curve = accuracy_curve(runs)
    place = curve.places.index(2.0)
    mean = sum(run.accuracy[1][0] for run in runs) / 3
    assert curve.lines["0"].mean[place] == pytest.approx(mean)
    assert page_data(runs, rows(runs))["axis"]["unit"] == "step"


def test_seen_counts_the_tasks_seen(tmp_path):
    runs = experiment(tmp_path, {"er": [(50, 80)]})
    curve = accuracy_curve(runs)
    assert curve.lines["seen"].mean[curve.places.index(1.0)] == 90
    assert curve.lines["seen"].mean[-1] == 65
    assert curve.lines["seen"].sd is None


def test_long_records_are_thinned_and_keep_the_ends_of_tasks(tmp_path):
    write_experiment(tmp_path, {"syngap": DEMO["syngap"]}, (0,), steps=400, every=1)
    runs = read_runs(tmp_path)
    curve = accuracy_curve(runs)
    assert len(curve.places) <= 300
    assert {0, 1, 2, 3, 4, 5} <= set(curve.places)
    layers = plasticity_curve(runs)
    assert len(layers.places) <= 120
    assert {"/mean", "0.weight/mean", "0.weight/q05", "0.weight/q95"} <= set(layers.lines)


def test_plasticity_that_is_not_finite_is_left_out(tmp_path):
    path = write_run(tmp_path, "syngap", DEMO["syngap"], 0, every=50)
    record = path / "metrics.jsonl"
    text = record.read_text()
    record.write_text(re.sub(r'("plasticity/0.bias/mean": )[0-9.]+', r"\1NaN", text))
    curve = plasticity_curve([read_run(path)])
    assert "0.bias/mean" not in curve.lines
    assert "0.bias/q05" in curve.lines
    record.write_text(re.sub(r'("plasticity/[^"]*": )[0-9.]+', r"\1NaN", text))
    assert plasticity_curve([read_run(path)]) is None


def test_rows_that_disagree_on_steps_share_an_axis_of_tasks(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"]}, (0,), every=50)
    write_run(tmp_path, "sgd", DEMO["sgd"], 0, steps=300, every=50)
    runs = read_runs(tmp_path)
    assert page_data(runs, rows(runs))["axis"] == {"unit": "task", "ends": [1, 2, 3, 4, 5]}


# The page


def test_page_is_one_small_file_and_the_same_each_time(demo, tmp_path):
    write_page(demo, tmp_path / "a.html", "digits", timestamp=NOON)
    write_page(demo, tmp_path / "b.html", "digits", timestamp=NOON)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.html").read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert "2025-11-15 12:00 UTC" in text
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)


def test_page_data_cannot_break_out(demo):
    hostile = "</script><img src=x onerror=alert(1)> <!-- {{script}} & \u2028"
    assert json.loads(embed_json({hostile: hostile})) == {hostile: hostile}
    assert not re.search("[<>&\u2028]", embed_json(hostile))
    text = page(demo, hostile, timestamp=NOON)
    assert "<img" not in text
    assert "{{script}}" in text
    assert text.count("</script>") == 2


def test_page_of_an_experiment_that_has_only_begun(tmp_path):
    write_experiment(tmp_path, {}, ())
    write_run(tmp_path, "er", DEMO["er"], 0, state="running")
    text = page(read_runs(tmp_path), "begun", timestamp=NOON)
    assert "No run has finished yet." in text
    assert "ER, seed 0: stopped at step 0 of 500" in text


def test_page_tells_shared_configuration_once(demo):
    found = page_data(demo, rows(demo))
    assert "name: digits" in found["shared"]
    assert "name: er\n" in found["rows"][5]["config"]
    assert "digits" not in found["rows"][5]["config"]
    assert ["versions.torch", "2.13.0"] in found["environment"]


def test_configuration_that_differs_by_seed_is_told_by_seed(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"]}, (0, 1), every=50)
    write_run(tmp_path, "er", DEMO["er"], 2, every=50, extra={"device": "cuda"})
    runs = read_runs(tmp_path)
    told = page_data(runs, rows(runs))["rows"][0]["config"]
    assert told == "# seed 0, 1\ndevice: cpu\n\n# seed 2\ndevice: cuda\n"


def test_accuracy_alone_is_enough_for_a_report(tmp_path):
    write_experiment(tmp_path, {"er": DEMO["er"], "syngap": DEMO["syngap"]}, every=50)
    for record in tmp_path.glob("*/metrics.jsonl"):
        record.unlink()
    runs = read_runs(tmp_path)
    found = rows(runs)
    assert found[0].spread("ACC") is not None
    assert found[0].spread("anytime") is None
    assert len(page_data(runs, found)["axis"]["ends"]) == 5
    assert "is most accurate, significantly ahead of " in page(runs, "R alone")
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        accuracy_figure(runs, tmp_path / "a.svg")


# Figures


def test_figure_is_the_same_each_time(demo, tmp_path):
    pytest.importorskip("matplotlib")
    accuracy_figure(demo, tmp_path / "a.svg")
    accuracy_figure(demo, tmp_path / "b.svg")
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert drawn.startswith(b"<?xml")
    assert b"<dc:date>" not in drawn


def test_figure_of_chosen_rows(demo, tmp_path):
    pytest.importorskip("matplotlib")
    accuracy_figure(demo, tmp_path / "a.svg", ["sgd", "er"])
    with pytest.raises(UserError, match='no finished row "derp"; did you mean "derpp"'):
        accuracy_figure(demo, tmp_path / "b.svg", ["derp"])
    with pytest.raises(UserError, match="no stream to draw"):
        accuracy_figure(demo, tmp_path / "b.svg", ["joint"])
