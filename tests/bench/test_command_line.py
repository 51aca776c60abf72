"""What cannot be done is refused in one line before anything is written; what can be, is done."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny import called, job, results, run_inline, state, tiny, tree, write_arrays, written

import syngap
from syngap.bench import api, cli
from syngap.bench.cli import arguments, running
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import Event, run_here
from syngap.bench.runner.progress import Display
from syngap.bench.runner.run import Job
from syngap.bench.store import records as files
from syngap.bench.store.records import alone_in

Said = tuple[int, str, str]
Call = Callable[..., Said]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment, on a machine without data sets."""
    folder = tmp_path / "here"
    folder.mkdir()
    written(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SYNGAP_DATA", raising=False)
    return folder


@pytest.fixture
def call(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line, with its runs in this process: a worker takes seconds to start."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return lambda *arguments: called(capsys, *arguments)


@pytest.fixture
def refused(here: Path, call: Call) -> Callable[..., str]:
    """The one line by which something is refused; nothing was written for it."""

    def ask(*arguments: object) -> str:
        before = tree(here)
        code, printed, said = call(*arguments)
        assert (code, printed) == (2, "")
        assert said.startswith("syngap: ")
        assert said.endswith("\n")
        assert len(said.splitlines()) == 1, said
        assert tree(here) == before
        return said[len("syngap: ") : -1]

    return ask


# Refused: what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "'rnu'"),
        (["run"], "experiment"),
        (["run", "tiny.yaml", "more"], "more"),
        (["run", "tiny.yaml", "--seed", "1"], "--seeds"),
        (["run", "tiny.yaml", "--seeds"], "--seeds"),
        (["run", "tiny.yaml", "--workers", "0"], "--workers"),
        (["run", "tiny.yaml", "--workers", "-1"], "--workers"),
        (["run", "tiny.yaml", "--workers", "many"], "--workers"),
        (["demo", "--set", "stream.epochs=1"], "--set"),
        (["demo", "--workers", "0"], "--workers"),
        (["--versoin"], "--version"),
        (["data"], "name"),
        (["data", "cifar10"], "cifar100"),
        (["data", "core50", "--size", "64"], "size: got 64, but core50 is published in 128 and 32"),
        (["data", "core50", "--size", "big"], "--size"),
        (["report"], "runs"),
    ],
    ids=" ".join,
)
def test_commands_and_flags_that_there_are_not(
    arguments: list[str], words: str, refused: Callable[..., str]
) -> None:
    assert words.lower() in refused(*arguments).lower()


def test_going_on_with_what_is_to_be_removed(refused: Callable[..., str]) -> None:
    assert refused("run", "tiny.yaml", "--resume", "--fresh") == (
        "--resume and --fresh: got both, expected one. --resume continues earlier runs; "
        "--fresh deletes them"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", 'unknown experiment "digit"; did you mean "digits"?'),
        ("quux", 'unknown experiment "quux"; there are buffers-cifar100'),
        ("", 'unknown experiment ""'),
        ("../digits", 'unknown experiment "../digits"'),
        (".", '".": is a folder; expected a .yaml file'),
        ("missing.yaml", "missing.yaml: cannot be read (No such file or directory)"),
        ("folder.yaml", "folder.yaml: is not a plain file"),
        ("a.yaml/b.yaml", "a.yaml/b.yaml: cannot be read"),
    ],
)
def test_experiments_that_there_are_not(
    name: str, words: str, here: Path, refused: Callable[..., str]
) -> None:
    (here / "folder.yaml").mkdir()
    assert refused("run", name).startswith(words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "",
            "bad.yaml: got nothing, expected names with values, such as "
            "{stream: digits, model: mlp, methods: {sgd: {lr: 0.1}}}",
        ),
        ("- a\n- b\n", 'bad.yaml: got ["a", "b"], expected names with values'),
        ("42", "bad.yaml: got 42, expected names with values"),
        ("stream:\n\tname: digits\n", "bad.yaml, line 2: not YAML (found character '\\t'"),
        ("stream: {name: digits\nmodel: mlp\n", "bad.yaml, line 2: not YAML"),
        ("stream: !!python/object:os.system {}\n", "bad.yaml, line 1: not YAML (could not"),
        ("a: *b\n", "bad.yaml, line 1: not YAML (found undefined alias"),
        ("a: !!timestamp x\n", "bad.yaml: not YAML"),
        ("a: " + "[" * 5000, "bad.yaml, line 1: not YAML (values nested too deep)"),
        ("a: b\n---\nc: d\n", "bad.yaml, line 2: not YAML (but found another document)"),
        ("a: \x00", "bad.yaml: not YAML"),
        (b"name: \xff\xfe", "bad.yaml: cannot be read (UnicodeDecodeError)"),
        ("model: mlp\nmethods: {er: }\n", "stream: missing"),
        ("stream: digits\nmodel: mlp\n", "methods: missing"),
        ("stream: digits\nmodel: mlp\nmethods: [er]\n", 'methods: got ["er"], expected names'),
        ("stream: &a [*a]\nmodel: mlp\nmethods: {er: }\n", "bad.yaml, line 1: not YAML (a value"),
    ],
)
def test_files_that_are_no_experiment(
    content: str | bytes, words: str, here: Path, refused: Callable[..., str]
) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    (here / "bad.yaml").write_bytes(raw)
    assert refused("run", "bad.yaml").startswith(words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "stream.epochs",
            '--set: got "stream.epochs", expected key=value, such as stream.epochs=2',
        ),
        ("=2", '--set: got "=2", expected key=value'),
        ("stream..epochs=2", '--set: got "stream..epochs=2", expected key=value'),
        ("stream.epochs=[2", "--set stream.epochs, line 1: not YAML"),
        ("sream.epochs=2", 'sream: unknown option; did you mean "stream"?'),
        ("stream.epoch=2", 'stream.epoch: unknown option; did you mean "epochs"?'),
        ("stream.name.x=2", 'stream.name: got "digits", expected names with values'),
        ("stream.name=digit", 'stream.name: unknown stream "digit"; did you mean "digits"?'),
        ("stream.name=quux", 'stream.name: unknown stream "quux"; there are digits, cifar100'),
        ("stream.name=3", "stream.name: got 3, expected one of digits, cifar100"),
        ("model.name=mpl", 'model.name: unknown model "mpl"; did you mean "mlp"?'),
        ("model.hiden=[3]", 'model.hiden: unknown option; did you mean "hidden"?'),
        ("methods.err.lr=1", 'methods.err: unknown; did you mean "er"?'),
        (
            "methods.lr=1",
            "methods.lr: unknown; expected methods.ROW.lr, rows are sgd, er. To add a row, name "
            "its method: --set methods.lr.method=METHOD",
        ),
        ("methods.er.method=syngpa", 'methods.er: unknown method "syngpa"; did you mean "syngap"?'),
        ("methods.er.bufer=5", 'methods.er.bufer: unknown option; did you mean "buffer"?'),
        ("methods.er.lr=fast", 'methods.er.lr: got "fast", expected a positive number'),
        ("methods.er.lr=0", "methods.er.lr: got 0, expected a positive number"),
        ("methods.er.lr=", "methods.er.lr: got null, expected a positive number"),
        ("methods.er.lr=.nan", "methods.er.lr: got NaN, expected a positive number"),
        ("methods.er.buffer=-1", "methods.er.buffer: got -1, expected a whole number ≥ 0"),
        ("methods.er.buffer=true", "methods.er.buffer: got true, expected a whole number ≥ 0"),
        ("methods.er=false", "methods.er: got false, expected names with values"),
        ("methods.er=3", "methods.er: got 3, expected names with values"),
        ("methods=3", "methods: got 3, expected names with values"),
        ("methods={}", "methods: missing"),
        ("methods.er.memory=big", 'methods.er.memory: got "big", expected one of "reservoir", "ba'),
        ("stream.batch=0", "stream.batch: got 0, expected a whole number ≥ 1"),
        ("stream.blur=2", "stream.blur: got 2, expected a number between 0 and 1"),
        ("stream.tasks=3", "stream.tasks: 10 classes cannot be cut into 3 equal tasks; 2, 5, 10"),
        ("stream.first=9", "stream.first: got 9; the stream has 5 tasks"),
        ("model.hidden=[0]", "model.hidden: got [0], expected a list, each a whole number ≥ 1"),
        ("model.hidden=[1000000000000000]", "model: mlp cannot be made ("),
        (
            "training.device=tpu",
            'training.device: got "tpu", expected one of "auto", "cpu", "cuda"',
        ),
        ("training=fast", 'training: got "fast", expected names with values'),
        (
            "training.checkpoint_seconds=-1",
            "training.checkpoint_seconds: got -1, expected a number",
        ),
        ("methods.er={optimizer: adam, momentum: 0.9}", "methods.er.momentum: got 0.9 with adam"),
        ("name=a/b", 'name: got "a/b", expected a name of letters, digits and _ . + -'),
        ("name=..", 'name: got "..", expected a name'),
        ("seeds=[1, 1]", "seeds: got [1, 1], expected different whole numbers ≥ 0"),
        ("seeds=[]", "seeds: got [], expected different whole numbers ≥ 0"),
        ("seeds=true", "seeds: got [true], expected different whole numbers ≥ 0"),
        ("seeds=0..x", 'seeds: got "0..x", expected numbers such as 0..4 or 0,1,2'),
    ],
)
def test_settings_that_cannot_be(setting: str, words: str, refused: Callable[..., str]) -> None:
    assert refused("run", "tiny.yaml", "--set", setting).startswith(words)


@pytest.mark.parametrize("seeds", ["", "x", "-1", "3..1", "0..", "1.5", "0,0", "0..99999999", "1,"])
def test_seeds_that_are_none(seeds: str, refused: Callable[..., str]) -> None:
    assert refused("run", "tiny.yaml", "--seeds", seeds).startswith("--seeds: got ")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("err", 'methods: unknown "err"; did you mean "er"?'),
        ("er,quux", 'methods: unknown "quux"; there are sgd, er'),
        ("", 'methods: unknown ""; there are sgd, er'),
        (
            "er sgd",
            '--methods: got "er sgd", expected commas in place of spaces: --methods er,sgd',
        ),
        (
            "adam",
            'methods: unknown "adam"; the experiment has no such row: '
            "--set methods.adam={} adds it",
        ),
    ],
)
def test_rows_that_there_are_not(rows: str, words: str, refused: Callable[..., str]) -> None:
    assert refused("run", "tiny.yaml", "--methods", rows) == words


ADDED = ("--set", "methods.er_slow.lr=0.03", "--set", "methods.er_slow.method=er")


def test_a_row_that_a_setting_adds_has_the_options_of_its_methods_row(call: Call) -> None:
    code, _, said = call("run", "tiny.yaml", "--methods", "er_slow", *ADDED, "--out", "out")
    assert code == 0
    assert said.startswith(
        "methods.er_slow: new row, method er. It takes from the row er: buffer=20, replay=10.\n"
    )
    options = yaml.safe_load(Path("out/experiment.yaml").read_text())["methods"]["er_slow"]
    expected = {"method": "er", "lr": 0.03, "buffer": 20, "replay": 10}
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (["derpp.lr=0.1"], " Other rows have buffer=20, replay=10."),
        (["derpp.buffer=30"], " Other rows have replay=10."),
        (["derpp.buffer=30", "derpp.replay=5"], ""),
        (["adam.lr=0.1"], ""),  # it has no memory
    ],
)
def test_a_row_that_a_setting_adds_has_the_methods_defaults_where_there_is_no_such_row(
    settings: list[str], hint: str, call: Call
) -> None:
    """And a line says which options of memories the other rows have, where it could have them."""
    method = settings[0].partition(".")[0]
    given = [word for setting in settings for word in ("--set", f"methods.{setting}")]
    code, _, said = call("run", "tiny.yaml", "--methods", method, *given)
    assert code == 0
    assert said.splitlines()[0] == (
        f"methods.{method}: new row, method {method}. "
        f"Options that are not set have the method's defaults.{hint}"
    )


def test_a_row_that_is_there_is_not_announced(call: Call) -> None:
    code, _, said = call("run", "tiny.yaml", "--methods", "er", "--set", "methods.er.lr=0.1")
    assert code == 0
    assert "new row" not in said


def test_help_begins_with_a_short_sentence_and_explains_every_option() -> None:
    program = cli._command()
    for name, command in program.commands.items():
        first = command.help.split(".")[0]
        assert len(first) <= 60, name
        assert "\n" not in first, name
        for param in command.params:
            assert 0 < len(param.help or "") <= 75, (name, param.name)


def test_an_option_that_takes_one_value_is_refused_where_it_is_given_twice(
    refused: Callable[..., str],
) -> None:
    """In every command; all names of a list are in the advice. Options that repeat say so."""
    program = cli._command()
    for command in (program, *program.commands.values()):
        for param in command.params:
            option = param.opts[0]
            if param.param_type_name != "option" or param.is_flag:
                continue
            assert param.multiple == ("repeatable" in param.help), option
            if not param.multiple:
                once = f"{option} 1,2,3" if param.metavar in arguments.LISTS else "it once"
                said = refused(command.name, option, "1,2", f"{option}=2,3")
                assert said == f'{option}: given twice ("1,2", "2,3"); write {once}'


def test_a_gpu_where_there_is_none(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = refused("run", "tiny.yaml", "--set", "training.device=cuda")
    assert said.startswith('training.device: got "cuda", but torch finds no GPU')


# Refused: data ------------------------------------------------------------------------------------


def cifar(folder: Path, train: bytes) -> None:
    (folder / "cifar-100-binary").mkdir()
    (folder / "cifar-100-binary/train.bin").write_bytes(train)
    (folder / "cifar-100-binary/test.bin").write_bytes(train)


def test_data_that_is_not_there(here: Path, refused: Callable[..., str]) -> None:
    said = refused("run", "tiny.yaml", "--set", "stream={name: cifar100}")
    assert said.startswith("found no cifar-100-binary")
    assert 'fetch it with "syngap data cifar100" or name its folder with --data' in said
    said = refused("run", "tiny.yaml", "--set", "stream={name: cifar100}", "--data", "nowhere")
    assert said == '--data: there is no folder "nowhere"'
    said = refused("run", "tiny.yaml", "--set", "stream={name: npz, path: x.npz, tasks: 2}")
    assert said.startswith("stream.path: there is no ")
    assert refused("run", "tiny.yaml", "--set", "stream={name: npz}") == (
        "stream.path: missing, expected text"
    )


def test_data_that_is_cut_off(here: Path, refused: Callable[..., str]) -> None:
    cifar(here, bytes(3074 * 3 + 5))
    said = refused("run", "tiny.yaml", "--set", "stream={name: cifar100}", "--data", here)
    assert "train.bin: 9227 bytes, no whole number of images of 3074" in said


def test_data_that_misses_classes(here: Path, refused: Callable[..., str]) -> None:
    cifar(here, bytes(3074 * 3))
    said = refused("run", "tiny.yaml", "--set", "stream={name: cifar100}", "--data", here)
    assert "train.bin: images of 1 class, expected all 100" in said


def test_samples_that_the_network_cannot_take(here: Path, refused: Callable[..., str]) -> None:
    write_arrays(here / "vectors.npz")
    stream = "stream={name: npz, path: vectors.npz, tasks: 2}"
    said = refused("run", "tiny.yaml", "--set", stream, "--set", "model={name: resnet18}")
    assert said == "model: resnet18 takes images (channels, height, width), got shape (6,)"


# Refused: folders ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment that is done."""
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run_local", run_inline)
        assert cli.main(["run", written(folder), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def out(here: Path, earlier: Path) -> Path:
    """A copy of it."""
    shutil.copytree(earlier, here / "out")
    return here / "out"


RUN = ("run", "tiny.yaml", "--out", "out")


@pytest.mark.usefixtures("out")
def test_a_folder_with_runs_is_not_taken_without_being_told_how(
    refused: Callable[..., str],
) -> None:
    assert refused(*RUN) == (
        "out: holds runs already; --resume goes on with them, --fresh removes them, "
        "or give another --out"
    )


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize("how", [(), ("--resume",), ("--fresh",)])
def test_a_folder_of_another_experiment_is_left_alone(
    how: tuple[str], refused: Callable[..., str]
) -> None:
    assert refused(*RUN, *how, "--set", "name=other") == (
        'out: holds runs of another experiment, "tiny", not "other"; give another --out'
    )


@pytest.mark.parametrize("how", [(), ("--resume",), ("--fresh",)])
def test_a_folder_with_other_things_is_left_alone(
    how: tuple[str], here: Path, refused: Callable[..., str]
) -> None:
    (here / "out").mkdir()
    (here / "out/thesis.tex").write_text("years of work")
    assert refused(*RUN, *how) == (
        "out: holds other things (thesis.tex) and no runs; give another --out"
    )


def test_a_file_is_no_folder(here: Path, refused: Callable[..., str]) -> None:
    (here / "out").write_text("a file")
    assert refused(*RUN) == "out: is not a folder"
    assert refused("run", "tiny.yaml", "--out", "out/deeper") == "out/deeper: is not a folder"


def test_where_there_is_no_permission(
    here: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may do anything
    assert refused(*RUN) == "out: no permission to write in ."


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody may write")
def test_where_nothing_can_be_written_whatever_the_permissions_say(
    refused: Callable[..., str],
) -> None:
    said = refused("run", "tiny.yaml", "--out", "/proc/runs")
    assert said.startswith(("/proc/runs: cannot be written (", "/proc/runs: no permission"))
    assert "x" * 300 in refused("run", "tiny.yaml", "--out", "x" * 300)


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--set", "methods.er.lr=0.5"], "methods.er.lr was 0.3 there and is 0.5 now"),
        (["--set", "stream.epochs=2"], "stream.epochs was 1 there and is 2 now"),
        (["--set", "stream.first="], "stream.first was 2 there and is null now"),
        (["--set", "model.hidden=[9]"], "model.hidden was [8] there and is [9] now"),
        (["--set", "training.threads=2"], "training.threads was 1 there and is 2 now"),
        # New runs beside old ones would otherwise share a table with what they do not compare to.
        (["--set", "stream.epochs=2", "--seeds", "7"], "stream.epochs was 1 there and is 2 now"),
        (
            ["--set", "methods.er.lr=1", "--seeds", "7"],
            "methods.er.lr was 0.3 there and is 1.0 now",
        ),
    ],
    ids=str,
)
def test_a_folder_of_another_configuration_is_left_alone(
    arguments: list[str], difference: str, refused: Callable[..., str]
) -> None:
    assert refused(*RUN, "--resume", *arguments) == (
        f"out/experiment.yaml: {difference}; give another --out, or --fresh"
    )


def test_a_run_of_another_configuration_is_left_alone(
    out: Path, refused: Callable[..., str]
) -> None:
    """Whoever changed it, and whatever experiment.yaml says."""
    path = out / "er-0/config.yaml"
    path.write_text(path.read_text().replace("lr: 0.3", "lr: 0.4"))
    assert refused(*RUN, "--resume") == (
        "out/er-0/config.yaml: method.lr was 0.4 there and is 0.3 now; "
        "give another --out, or --fresh"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("experiment.yaml", "a: ["),
        ("experiment.yaml", ""),
        ("er-0/config.yaml", "- 1"),
        ("er-0/status.json", "{"),
        ("er-0/accuracy.csv", "after,task_1\n1,high\n"),
        ("er-0/metrics.jsonl", "{}\n"),
    ],
)
def test_files_that_somebody_damaged_are_named(
    name: str, content: str, out: Path, refused: Callable[..., str]
) -> None:
    (out / name).write_text(content)
    words = f"out/{name}: not as syngap wrote it ("
    if not name.endswith(("accuracy.csv", "metrics.jsonl")):  # going on needs no more of them
        assert refused(*RUN, "--resume").startswith(words)
    assert refused("report", "out").startswith(words)


def test_an_experiment_that_is_none_any_more_is_named(
    out: Path, refused: Callable[..., str]
) -> None:
    """As after a plug-in was removed."""
    path = out / "experiment.yaml"
    path.write_text(path.read_text().replace("method: sgd", "method: gone"))
    assert refused(*RUN, "--resume").startswith(
        'out/experiment.yaml: methods.sgd: unknown method "g'
    )


def test_a_folder_in_which_another_process_is_at_work(
    out: Path, refused: Callable[..., str]
) -> None:
    pytest.importorskip("fcntl")
    with files.alone_in(out):
        for how in ("--resume", "--fresh"):
            assert refused(*RUN, how, "--seeds", "1") == "out: another process is at work there"


def test_a_report_of_nothing(here: Path, refused: Callable[..., str]) -> None:
    assert refused("report", "out") == "out: there is no such folder"
    assert refused("report", "tiny.yaml") == "tiny.yaml: there is no such folder"
    (here / "out").mkdir()
    shutil.copy(here / "tiny.yaml", here / "out/experiment.yaml")
    assert refused("report", "out") == "out: no run has begun there"


def test_a_figure_in_a_folder_that_is_not_there(out: Path, call: Call) -> None:
    code, _, said = call("report", "out", "--figure", "nowhere/figure.svg")
    assert code == 2
    assert said.splitlines()[-1] == "syngap: nowhere/figure.svg: No such file or directory"


def test_refusals_leave_one_line_and_exit_code_2_to_the_shell(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "syngap", "run", "tiny.yaml", "--set", "methods.er.lr=fast"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'syngap: methods.er.lr: got "fast", expected a positive number\n'
    assert sorted(tree(here)) == ["tiny.yaml"]


# Done ---------------------------------------------------------------------------------------------


def test_a_run_takes_settings_seeds_rows_and_a_folder(here: Path, call: Call) -> None:
    code, printed, said = call(
        *("run", "tiny.yaml", "--set", "methods.er.lr=0.2", "--set", "stream.batch=200"),
        *("--seeds", "3,5..6", "--methods", "er", "--out", "deep/down", "--workers", "2"),
    )
    assert code == 0
    out = here / "deep/down"
    assert sorted(path.name for path in out.iterdir()) == [
        *("er-3", "er-5", "er-6", "experiment.yaml", "index.html"),
    ]
    config = yaml.safe_load((out / "er-5/config.yaml").read_text())
    assert (config["seed"], config["method"]["lr"], config["stream"]["batch"]) == (5, 0.2, 200)
    plan = yaml.safe_load((out / "experiment.yaml").read_text())
    assert (list(plan["methods"]), plan["seeds"]) == (["er"], [3, 5, 6])
    assert "ER" in printed
    assert "The page is deep/down/index.html" in printed
    lines = said.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1 of 3", "2 of 3", "3 of 3"]
    assert all("ACC" in line for line in lines)


def test_without_a_folder_runs_go_where_their_name_says(here: Path, call: Call) -> None:
    assert call("run", "tiny.yaml", "--methods", "sgd")[0] == 0
    assert (here / "runs/tiny/sgd-0/accuracy.csv").is_file()


def test_what_is_done_is_not_done_again(out: Path, call: Call) -> None:
    before = {path: content for path, content in tree(out).items() if path != "index.html"}
    code, printed, said = call(*RUN, "--resume")
    assert code == 0
    assert said == "2 of 2 runs already done, in out; --fresh would run them again\n"
    assert "ER" in printed
    after = {path: content for path, content in tree(out).items() if path != "index.html"}
    assert after == before


def test_going_on_adds_seeds_and_rows(out: Path, call: Call) -> None:
    before = results(out / "er-0")
    code, _, said = call(*RUN, "--resume", "--seeds", "0,1", "--methods", "er")
    assert code == 0
    assert said.splitlines()[0].startswith("1 of 2 runs already done, in out;")
    assert said.splitlines()[1].startswith("1 of 1  er-1 ")
    code, printed, said = call(*RUN, "--resume", "--set", "methods.adam.lr=0.01")
    assert code == 0
    assert said.splitlines()[1].startswith("2 of 3 runs already done, in out;")
    assert said.splitlines()[2].startswith("1 of 1  adam-0 ")
    assert "adam, seed 1: not begun" in " ".join(printed.lower().split())
    plan = yaml.safe_load((out / "experiment.yaml").read_text())
    assert (list(plan["methods"]), plan["seeds"]) == (["sgd", "er", "adam"], [0, 1])
    assert all(name in printed for name in ("SGD", "ER", "Adam"))
    assert results(out / "er-0") == before


@pytest.mark.skipif(os.name != "posix", reason="the lock needs fcntl")
@pytest.mark.parametrize("how", ["--resume", "--fresh"])
def test_a_folder_in_which_another_process_works_is_left_alone(
    out: Path, call: Call, how: str
) -> None:
    before = tree(out)
    with alone_in(out):
        code, _, said = call(*RUN, how, "--seeds", "5")
    assert (code, said) == (2, "syngap: out: another process is at work there\n")
    assert tree(out) == before
    assert call(*RUN, how, "--seeds", "5")[0] == 0  # it has ended


def test_beginning_afresh_removes_the_runs_that_were_there(out: Path, call: Call) -> None:
    (out / "mine").mkdir()
    (out / "mine/notes.txt").write_text("not of a run")
    code, _, said = call(*RUN, "--fresh", "--methods", "er", "--set", "stream.batch=50")
    assert code == 0
    assert "left" not in said
    assert not (out / "sgd-0").exists()
    assert yaml.safe_load((out / "er-0/config.yaml").read_text())["stream"]["batch"] == 50
    assert (out / "mine/notes.txt").is_file()


def test_what_is_refused_removes_nothing_either(out: Path, refused: Callable[..., str]) -> None:
    refused(*RUN, "--fresh", "--set", "stream.tasks=3")
    refused(*RUN, "--fresh", "--set", "stream.first=9")


def test_paths_are_printed_as_they_are(here: Path, call: Call) -> None:
    """Neither cut into lines nor read as markup."""
    folder = "[bold]runs[/]/" + "long-" * 20
    assert call("run", "tiny.yaml", "--out", folder, "--methods", "sgd")[0] == 0
    _, printed, said = call("run", "tiny.yaml", "--out", folder, "--methods", "sgd", "--resume")
    assert f"in {folder}; --fresh" in said
    assert f"The page is {folder}/index.html\n" in printed


def test_the_demo_runs_and_goes_on(here: Path, call: Call) -> None:
    code, printed, said = call("demo", "--methods", "sgd", "--seeds", "0")
    assert code == 0
    assert "1 of 1  sgd-0 " in said
    assert "The page is runs/demo/index.html" in printed
    assert call("demo", "--methods", "sgd", "--seeds", "0")[2].startswith("1 of 1 run already")


def test_the_demo_shows_protection_before_streams(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, shown = [], []

    def run(experiment: str, *, methods: object, out: Path, **_: object) -> str:
        asked.append((experiment, methods, str(out)))
        return experiment

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(
        running, "_print_result", lambda runs, opening: shown.append((runs, opening))
    )
    assert call("demo", "--out", "mine")[0] == 0
    assert asked == [
        ("finetune-demo", ["adamw", "protect"], "mine-finetuning"),
        ("digits", None, "mine"),
    ]
    assert shown == [("finetune-demo", None), ("digits", "finetune-demo")]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("run", "tiny.yaml"), "The same command with --resume goes on, in runs/tiny."),
        (("run", "tiny.yaml", "--resume"), "The same command goes on, in runs/tiny."),
        (
            ("run", "tiny.yaml", "--fresh"),
            "The same command with --resume in place of --fresh goes on, in runs/tiny.",
        ),
        (("demo",), "The same command goes on, in runs/demo-finetuning."),
        (
            ("demo", "--fresh", "--methods", "sgd"),
            "The same command without --fresh goes on, in runs/demo.",
        ),
    ],
    ids=str,
)
def test_whoever_stops_it_is_told_how_to_go_on(
    arguments: tuple[str, ...], advice: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "run_local", interrupted)
    assert call(*arguments) == (130, "", f"Stopped. {advice}\n")


# Failed -------------------------------------------------------------------------------------------

FRAGILE = '''
import os, signal
from pathlib import Path

from syngap.bench.methods.sgd import SGD


class Fragile(SGD):
    """Its process is killed at the first try, as by a system that is out of memory."""

    def remember(self, batch):
        marker = Path(__file__).with_name("tried")
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package offers the method `fragile`."""
    info = tmp_path / "theirs/fragile-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[syngap.methods]\nfragile = fragile_method:Fragile\n")
    (info.parent / "fragile_method.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(info.parent)
    yield
    sys.modules.pop("fragile_method", None)


@pytest.mark.slow
@pytest.mark.usefixtures("fragile", "quick_workers")
def test_a_run_that_fails_leaves_the_others_alone_and_is_tried_again(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"fragile": None, "wild": {"method": "sgd", "lr": 1e30}, "er": {"buffer": 20}}
    stream = {"name": "npz", "path": "data.npz", "tasks": 2}
    experiment = {**tiny(), "methods": methods, "stream": stream}
    (here / "tiny.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    write_arrays(here / "data.npz")
    code, printed, said = called(capsys, *RUN, "--workers", 1)
    assert code == 1

    lines = said.splitlines()
    assert "fragile-0            failed: its process died (SIGKILL)" in lines[0]
    assert "wild-0               failed: FloatingPointError: the logits of step 2 of " in lines[1]
    assert "er-0                 ACC" in lines[2]
    assert "fragile (0 of 1 seed)" in printed
    states = {row: state(here / f"out/{row}-0") for row in ("fragile", "wild", "er")}
    assert states == {"fragile": "failed", "wild": "failed", "er": "done"}
    assert (here / "out/fragile-0/error.txt").read_text() == "its process died (SIGKILL)\n"
    trace = (here / "out/wild-0/error.txt").read_text()
    assert trace.startswith("Traceback")
    assert "a smaller lr may help" in trace
    status = json.loads((here / "out/wild-0/status.json").read_text())
    assert status["error"].startswith("FloatingPointError: ")
    assert status["steps"] == 20, "what was known before stays known"
    assert not (here / "out/er-0/error.txt").exists()

    monkeypatch.setattr(engine, "run_local", run_inline)
    code, printed, said = called(capsys, *RUN, "--resume", "--methods", "fragile,er")
    assert code == 0
    assert said.splitlines()[0].startswith("1 of 2 runs already done")
    assert "1 of 1  fragile-0            ACC" in said.splitlines()[1]
    assert state(here / "out/fragile-0") == "done"
    assert not (here / "out/fragile-0/error.txt").exists()
    code, _, said = called(capsys, *RUN, "--resume", "--methods", "wild")
    assert code == 1
    assert "FloatingPointError: " in said


# Looked at ----------------------------------------------------------------------------------------


def test_a_report_has_a_table_and_a_page(out: Path, call: Call) -> None:
    (out / "index.html").unlink()
    code, printed, said = call("report", "out")
    assert (code, said) == (0, "")
    assert "ACC" in printed
    assert "The page is out/index.html" in printed
    assert "<title>tiny" in (out / "index.html").read_text(encoding="utf-8")


def test_a_report_in_markdown_is_nothing_but_the_table(out: Path, call: Call) -> None:
    code, printed, said = call("report", "out", "--markdown")
    assert code == 0
    assert printed.startswith("| method ")
    assert "page" not in printed
    assert said == "The page is out/index.html\n"


def test_a_report_draws_a_figure(out: Path, here: Path, call: Call) -> None:
    code, printed, _ = call("report", "out", "--figure", "figure.svg")
    assert code == 0
    assert "The figure is figure.svg" in printed
    assert (here / "figure.svg").read_text().startswith("<?xml")


def test_a_report_of_runs_under_way_says_what_is_missing(out: Path, call: Call) -> None:
    (out / "sgd-0/status.json").write_text('{"state": "running", "step": 2, "steps": 6}')
    with alone_in(out / "sgd-0"):
        code, printed, said = call("report", "out")
    assert code == 0
    assert "SGD (0 of 1 seed)" in printed
    assert "SGD, seed 0: running at step 2 of 6" in " ".join(printed.split())
    assert said == ""


def test_doctor_says_what_is_here(here: Path, call: Call) -> None:
    code, printed, said = call("doctor")
    assert (code, said) == (0, "")
    for words in (
        f"syngap {syngap.__version__}, Python 3.",
        "torch ",
        "device: ",
        "pydantic ",
        "cifar100: not found; `syngap data cifar100` fetches it, --data names its folder\n",
        "core50: not found; `syngap data core50` fetches it",
        f"free disk at {here}: ",
        "experiments: buffers-cifar100,",
        " digits,",
        "streams: digits, cifar100, core50, folder, npz",
        "models: mlp, cnn, resnet18",
        "methods: sgd, sgdm,",
        "extra dev ",
    ):
        assert words in printed


def test_doctor_finds_data(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SYNGAP_DATA", str(tmp_path / "data"))
    (tmp_path / "data/cifar-100-binary").mkdir(parents=True)
    printed = call("doctor")[1]
    assert f"cifar100: {tmp_path}/data/cifar-100-binary\n" in printed
    assert "core50: not found" in printed
    assert f"free disk at {tmp_path}/data: " in printed


def test_doctor_says_what_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import syngap.bench.doctor

    there = syngap.bench.doctor._version
    absent = ("rich", "mkdocs-material")
    monkeypatch.setattr(
        syngap.bench.doctor, "_version", lambda name: None if name in absent else there(name)
    )
    printed = call("doctor")[1]
    assert "rich: missing; pip install --upgrade 'syngap[bench]' brings it\n" in printed
    assert "(to build the documentation): not installed; pip install 'syngap[docs]'\n" in printed


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"syngap {syngap.__version__}\n", "")
    code, printed, said = call("--help")
    assert (code, said) == (0, "")
    for command in ("demo", "run", "report", "fill", "keep", "reproduce", "data", "doctor"):
        assert f"\n  {command} " in printed
        assert call(command, "--help")[1].startswith(f"Usage: syngap {command} ")
    assert call() == (0, printed, "")


def test_a_reader_that_leaves_early_hears_no_complaint(out: Path) -> None:
    """`syngap report out | head`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syngap", "report", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() in (1, -signal.SIGPIPE)


# Progress -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    task = job(tmp_path_factory.mktemp("finished") / "er-0")
    run_here(task)
    return task


def shown(task: Job, console: Console) -> str:
    """What is on the console after a run that is done and one that failed."""
    other = Job(task.folder.with_name("er-1"), replace(task.config, seed=1))
    with Display(console, [task, other], {"er": 6}) as display:
        display(Event(task, "begun"))
        display(Event(other, "begun"))
        display(Event(task, "step", 3, 51.5))
        display(Event(task, "done"))
        display(Event(other, "failed", message="no [room] left"))
    assert display.failed == {"er-1": "no [room] left"}
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_progress_in_a_file_is_plain_lines(finished: Job) -> None:
    lines = shown(finished, Console(file=io.StringIO())).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("1 of 2  er-0                 ACC ")
    assert "s left" in lines[0]
    assert lines[1] == "2 of 2  er-1                 failed: no [room] left"


def test_progress_on_a_terminal_has_bars(finished: Job) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    text = shown(finished, console)
    assert "all runs" in text
    assert "━" in text
    assert "\x1b[" in text
    lines = [line for line in text.splitlines() if " of 2  er-" in line]
    assert any(line.endswith("failed: no [room] left") for line in lines)
