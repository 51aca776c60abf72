"""The page works in a browser: what is clicked shows, nothing is fetched, nothing complains."""

from __future__ import annotations

import os
import re

import pytest
from chromium import FOUND, Chromium
from runfolders import DEMO, write_experiment, write_run

from syngap.experiments.folder import read_runs
from syngap.report.page import write_page

pytestmark = [
    pytest.mark.skipif(os.name != "posix" or not FOUND, reason="no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),  # one browser for all of them
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    runs = write_experiment(folder / "runs", every=20)
    write_run(
        runs, "er", DEMO["er"], 2, state="failed", tasks_done=2, error="RuntimeError: no luck"
    )
    write_page(read_runs(runs), folder / "page.html", "digits")
    return folder / "page.html"


@pytest.fixture(params=["light", "dark", "phone"])
def opened(request, browser, demo):
    width = 380 if request.param == "phone" else 1200
    browser.open(demo, width=width, dark=request.param == "dark")
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == [demo.as_uri()]


def text(browser, selector):
    return browser.value(f"document.querySelector({selector!r}).textContent")


def texts(browser, selector):
    return browser.value(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def column(browser, place):
    cells = f"#results tbody:first-of-type tr > :nth-child({place})"
    return [
        float(re.match("[−0-9.]+", cell)[0].replace("−", "-")) for cell in texts(browser, cells)
    ]


def test_body_never_scrolls_sideways(browser, demo):
    for width in (360, 380, 700, 1200, 1800):
        browser.open(demo, width=width)
        assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []


def test_colours_follow_the_system(browser, demo):
    papers = []
    for dark in (False, True):
        browser.open(demo, dark=dark)
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        papers.append(sum(map(int, re.findall(r"\d+", paper))))
    assert papers[0] > 700 > 100 > papers[1]


def test_table_is_sorted_by_accuracy_and_joint_stays_apart(opened):
    assert column(opened, 2) == sorted(column(opened, 2), reverse=True)
    assert len(column(opened, 2)) == len(DEMO) - 1
    assert "Joint" in text(opened, "#results tbody:last-of-type")


def test_table_sorts_by_click_and_by_keyboard(opened):
    forgetting = "#results thead th:nth-child(3)"
    sort = f"document.querySelector('{forgetting}').getAttribute('aria-sort')"
    opened.click(f"{forgetting} button")
    assert opened.value(sort) == "ascending"
    assert column(opened, 3) == sorted(column(opened, 3))
    opened.press("Enter")
    assert opened.value(sort) == "descending"
    assert column(opened, 3) == sorted(column(opened, 3), reverse=True)
    assert opened.value("document.querySelectorAll('[aria-sort]').length") == 1


def test_table_says_what_is_left_out(opened):
    assert "2 of 3 seeds" in texts(opened, "#results .few")
    assert texts(opened, "#missing li") == [
        "ER, seed 2: failed at step 200 of 500: RuntimeError: no luck"
    ]


def test_differences_are_shown_for_each_rival(opened):
    names = texts(opened, "#against tbody th span:first-child")
    assert names == ["ER", "SGD", "DER++"]
    assert "forgets less" in text(opened, "#against tbody tr:nth-child(2)")
    assert "2 seeds" in text(opened, "#against tbody tr:first-child")


def test_key_switches_lines(opened):
    lines = "document.querySelectorAll('#stream .plot g.line').length"
    assert opened.value(lines) == len(DEMO)
    opened.click("#stream .key li:first-child button")
    assert opened.value(lines) == len(DEMO) - 1
    assert (
        opened.value(
            "document.querySelector('#stream .key li button').getAttribute('aria-pressed')"
        )
        == "false"
    )
    opened.click("#stream .key .at button")
    assert opened.value(lines) == len(DEMO)
    opened.click("#stream .key .at button")
    assert opened.value(lines) == 0


def test_pointer_and_arrow_keys_read_values(opened):
    value = "#stream .key li.ours .value"
    assert text(opened, "#stream .key .at span") == "at the end"
    last = text(opened, value)
    opened.hover("#stream .plot", across=0.4)
    assert re.fullmatch(r"step \d+, task 2", text(opened, "#stream .key .at span"))
    assert text(opened, value) != last
    opened.value("document.querySelector('#stream .plot').focus()")
    opened.press("Home")
    assert text(opened, "#stream .key .at span") == "step 0, task 1"
    opened.press("PageUp")
    assert text(opened, "#stream .key .at span") == "after task 1"
    said = opened.value("document.querySelector('#stream .plot').getAttribute('aria-valuetext')")
    assert said.startswith("after task 1: ")
    assert f"SynGAP {text(opened, value)}" in said


def test_one_task_can_be_followed(opened):
    drawn = "document.querySelector('#stream g.line[data-name=\"sgd\"] .curve').getAttribute('d')"
    mean = opened.value(drawn)
    opened.click("#stream .choices label:nth-of-type(2) input")
    assert opened.value(drawn) != mean
    assert "Accuracy on task 1" in text(opened, "#stream .note")
    assert opened.value("document.querySelectorAll('#stream .plot .own').length") == 1
    ends = dict(zip(texts(opened, "#stream .name"), texts(opened, "#stream .value"), strict=True))
    assert float(ends["SGD"].split(" ± ")[0]) < 5 < 50 < float(ends["SynGAP"].split(" ± ")[0])


def test_plasticity_of_another_row_can_be_chosen(opened):
    label = "document.querySelector('#plasticity .plot').getAttribute('aria-label')"
    assert opened.value(label) == "Plasticity by layer, SynGAP"
    opened.click("#plasticity .choices label:nth-of-type(2) input")
    assert opened.value(label) == "Plasticity by layer, syngap, no replay"
    assert texts(opened, "#plasticity .key .name")[:2] == ["whole network", "0.weight"]


def test_matrix_cell_tells_its_value(opened):
    first = "#matrices figure:first-child"
    assert text(opened, f"{first} tbody tr:nth-child(2) td").isdigit()
    opened.click(f"{first} tbody tr:nth-child(2) td")
    told = text(opened, f"{first} .readout")
    assert re.fullmatch(r"After task 2, on task 1: \d+\.\d ± \d+\.\d", told)
    opened.value(f"document.querySelector('{first} table').focus()")
    opened.press("ArrowDown")
    assert text(opened, f"{first} .readout").startswith("After task 3, on task 1: ")


def test_configuration_opens(opened):
    opened.click("#setup details:nth-of-type(2) summary")
    opened.wait_for("document.querySelector('#setup details:nth-of-type(2)').open")
    assert "name: sgd" in text(opened, "#setup details:nth-of-type(2) pre")
    assert "syngap run digits" in text(opened, "#setup dl")


def test_hostile_names_stay_text(browser, tmp_path):
    hostile = "</script><img src=x onerror=console.log(1)>{{data}}<!--"
    runs = write_experiment(
        tmp_path / "runs", {"syngap": DEMO["syngap"]}, extra={hostile: hostile}, every=50
    )
    write_run(runs, "a</h2>", DEMO["er"], 0, every=50, extra={hostile: hostile})
    write_run(runs, "b", DEMO["er"], 0, state="failed", error=hostile, extra={hostile: hostile})
    write_page(read_runs(runs), tmp_path / "page.html", hostile)
    browser.open(tmp_path / "page.html")
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.title").startswith(hostile)
    assert hostile in text(browser, "#setup details pre")
    assert "a</h2>" in texts(browser, "#matrices figcaption")
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "page.html").as_uri()]


@pytest.mark.parametrize(
    "states", [{"er": "running"}, {"joint": "done"}, {"syngap": "done"}, {"er": "done"}]
)
def test_what_is_absent_is_left_out(browser, tmp_path, states):
    write_experiment(tmp_path / "runs", {}, ())
    for row, state in states.items():
        write_run(tmp_path / "runs", row, DEMO[row], 0, state=state, every=50)
    write_page(read_runs(tmp_path / "runs"), tmp_path / "page.html", "few")
    browser.open(tmp_path / "page.html")
    shown = browser.value(
        "[...document.querySelectorAll('section:not([hidden])')].map((e) => e.id)"
    )
    done = [row for row, state in states.items() if state == "done"]
    assert ("stream" in shown) == (done in (["syngap"], ["er"]))
    assert ("matrices" in shown) == bool(done)
    assert ("plasticity" in shown) == (done == ["syngap"])
    assert browser.complaints() == []
