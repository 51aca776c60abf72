"""The page works in a browser: what is clicked shows, nothing is fetched, nothing complains."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist

import pytest
from chromium import FOUND, Chromium
from runfolders import (
    DEMO,
    RATES,
    Made,
    write_experiment,
    write_made_landscape,
    write_run,
    write_search,
)

from syngap.bench.reporting.headline import compare, rivals, subject
from syngap.bench.reporting.page import write_page
from syngap.bench.reporting.rows import rows
from syngap.bench.reporting.statistics import half_width
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.store.surface import read_landscapes

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
    write_search(runs, {"er": DEMO["er"].options, "syngap": {"lr": 0.5}})
    write_page(read_runs(runs), folder / "page.html", "digits", search_folder=runs)
    return folder / "page.html"


@contextmanager
def looked_at(browser, page, how, widths):
    """Open a page, and see in the end that it had nothing to complain of and fetched nothing."""
    phone = how == "phone"  # which is dark too
    browser.open(page, width=widths[phone], dark=phone)
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


@pytest.fixture(params=["desk", "phone"])
def opened(request, browser, demo):
    with looked_at(browser, demo, request.param, (1200, 380)) as page:
        yield page


def text(browser, selector):
    return browser.value(f"document.querySelector({selector!r}).textContent")


def texts(browser, selector):
    return browser.value(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def style(browser, selector, name):
    element = f"document.querySelector({selector!r})"
    return browser.value(f"getComputedStyle({element}).getPropertyValue({name!r})")


def column(browser, place):
    cells = f"#results tbody:first-of-type tr > :nth-child({place})"
    return [
        float(re.match("[−0-9.]+", cell)[0].replace("−", "-")) for cell in texts(browser, cells)
    ]


def test_body_never_scrolls_sideways(browser, demo):
    for width in (360, 700, 1800):
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


def test_first_screen_has_the_verdict_the_cards_and_the_chart(browser, demo):
    browser.open(demo, width=1400, height=900)
    said = text(browser, ".headline")
    assert said.endswith(".")
    assert said.count(". ") == 0, "one sentence"
    for part in (".headline", "#against .cards", "#stream .plot"):
        box = browser.value(f"document.querySelector('{part}').getBoundingClientRect().toJSON()")
        assert box["bottom"] <= 900
        assert box["width"] > 300
    beside = "document.querySelector('#against').getBoundingClientRect().right"
    assert browser.value(f"{beside} < document.querySelector('.plot').getBoundingClientRect().left")
    browser.open(demo, width=400)
    below = "document.querySelector('#against').getBoundingClientRect().bottom"
    assert browser.value(f"{below} < document.querySelector('.plot').getBoundingClientRect().top")


def test_cards_have_the_featured_method_and_each_rival(opened):
    assert text(opened, "#against h2") == "SynGAP"
    assert texts(opened, ".card h3") == ["Accuracy", "Forgetting", "Training time"]
    for card in (1, 2, 3):
        names = texts(opened, f".card:nth-child({card}) .rival")
        assert names == ["vs ER (2 seeds)", "vs SGD", "vs DER++"]
    shown = dict(
        zip(texts(opened, "#stream .key .name"), texts(opened, "#stream .value"), strict=True)
    )
    assert texts(opened, ".card .figure")[0] == f"{shown['SynGAP']} %"
    assert "forgets less" in text(opened, ".card:nth-child(2) li:nth-child(2)")
    er = text(opened, ".card li:first-child")
    assert "too few seeds" in er, "in place of the interval"
    assert "±" not in er
    assert "× as long" in text(opened, ".card:last-child li").replace("×as", "× as")
    assert text(opened, "#scope") == f"5 tasks · {len(DEMO)} rows · 3 seeds"


def test_the_best_other_method_is_said_to_be_chosen_where_it_is_a_rival(browser, demo, tmp_path):
    few = {row: DEMO[row] for row in ("er", "sgd", "syngap")}
    write_page(read_runs(write_experiment(tmp_path, few, every=50)), tmp_path / "few.html", "few")
    for page, said in ((demo, True), (tmp_path / "few.html", False)):
        browser.open(page)
        note = browser.value("document.querySelector('.remarks').innerText")
        assert ("chosen by the ACC that is shown" in note) == said
        assert "more seeds may show one." in note
        assert note.startswith("SynGAP has a memory; SGD has none. Learning rates differ: ")


def test_cards_have_the_interval_that_the_verdict_goes_by(opened, demo):
    found = rows(read_runs(demo.parent / "runs"))
    sgd = compare(subject(found), rivals(found)[1]).accuracy
    shown = text(opened, ".card:first-child li:nth-child(2) .decided")
    assert shown == f"+{sgd.mean:.1f} ± {half_width(sgd):.1f}"


def test_a_difference_that_is_not_shown_has_its_reason_beside_the_dash(browser, tmp_path):
    quick = replace(DEMO["sgd"], seconds=0.5)
    made = {"er": DEMO["er"], "sgd": quick, "syngap": DEMO["syngap"]}
    runs = write_experiment(tmp_path / "runs", made, every=50)
    for seed in (7, 8, 9):
        write_run(runs, "derpp", DEMO["derpp"], seed, every=50)
    write_page(read_runs(runs), tmp_path / "page.html", "dashes")
    browser.open(tmp_path / "page.html")
    dashes = [said for said in texts(browser, ".card .found") if said.startswith("–")]
    assert dashes == [
        "–no common seed",
        "–no common seed",
        "–runs below a second",
        "–no common seed",
    ]


def test_without_syngap_the_most_accurate_method_has_the_cards(browser, tmp_path):
    made = {row: DEMO[row] for row in ("er", "sgd", "derpp")}
    runs = write_experiment(tmp_path, made, every=50)
    for record in runs.glob("*/metrics.jsonl"):
        record.unlink()
    write_page(read_runs(runs), tmp_path / "page.html", "others")
    browser.open(tmp_path / "page.html")
    assert text(browser, "#against h2") == "DER++"
    assert texts(browser, ".card:first-child .rival") == ["vs ER", "vs SGD"]
    tops = "[...document.querySelectorAll('.card')].map((e) => e.getBoundingClientRect().top)"
    assert len(set(browser.value(tops))) == 1, "in a row where there is no chart"
    assert browser.complaints() == []


def test_three_columns_are_shown_and_the_others_on_request(opened):
    shown = """[...document.querySelectorAll('#results thead th')].filter(
        (e) => e.offsetWidth).map((e) => e.textContent)"""
    assert opened.value(shown) == ["method", "ACC ↑", "FM ↓", "seconds ↓"]
    opened.click("#results thead th:nth-child(3) button")
    order = texts(opened, "#results tbody:first-of-type th")
    opened.value("document.querySelector('#results .switch').focus()")
    opened.press("Enter")
    assert len(opened.value(shown)) == 10
    assert "BWT ↑" in opened.value(shown)
    assert texts(opened, "#results tbody:first-of-type th") == order
    assert text(opened, "#results .switch") == "fewer columns"
    opened.click("#results thead th:nth-child(9) button")
    assert column(opened, 9) == sorted(column(opened, 9), reverse=True)
    opened.click("#results .switch")
    assert len(opened.value(shown)) == 4


def test_search_is_told_by_row(opened):
    rows = "#search > .scroll"
    assert texts(opened, f"{rows} thead th")[-4:-2] == ["trials", "diverged"]
    assert texts(opened, f"{rows} tbody th") == ["ER", "SynGAP"]
    assert texts(opened, f"{rows} tbody tr:first-child td:nth-child(2) span") == [
        "lr 0.01 to 1 (log)",
        "momentum 0 or 0.9",
    ]
    no_cost = ["–", "–"]  # in records of earlier versions
    expected = ["lr 0.5", "50.00", "3", "1", *no_cost]
    assert texts(opened, f"{rows} tbody tr:last-child td")[1:] == expected
    assert text(opened, "#search summary") == "All 6 trials"
    assert "The table does not have what was chosen for SynGAP." in text(opened, "#search .note")


WITHOUT = ["SGD", "SGDM", "Adam", "Ballistic", "EWC++", "SynGAP, alone"]
LINES = "document.querySelectorAll('#stream .plot g.line').length"


def test_key_switches_lines(opened):
    drawn = len(DEMO) - len(WITHOUT) + 1
    assert opened.value(LINES) == drawn
    opened.click("#stream .key li:first-child button")
    assert opened.value(LINES) == drawn - 1
    assert (
        opened.value(
            "document.querySelector('#stream .key li button').getAttribute('aria-pressed')"
        )
        == "false"
    )
    opened.click("#stream .key .at button")
    assert opened.value(LINES) == drawn
    opened.click("#stream .key .at button")
    assert opened.value(LINES) == 0


def test_methods_without_a_memory_are_one_band_until_asked_for(opened):
    band = "#stream g.line.band"
    assert text(opened, f"{band} .name") == "without a memory"
    assert text(opened, f"{band} .detail").startswith("SGD, ")
    assert f"without a memory: {'; '.join(WITHOUT)}." in text(opened, "#stream .note")
    low, high = map(float, text(opened, "#stream .key li.range .value").split("–"))
    assert not set(WITHOUT) & set(texts(opened, "#stream .key .name"))
    opened.value("document.querySelector('#stream form:last-child input').focus()")
    opened.press("ArrowRight")
    assert opened.value(LINES) == len(DEMO)
    assert opened.value(f"document.querySelectorAll('{band}').length") == 0
    ends = dict(
        zip(texts(opened, "#stream .key .name"), texts(opened, "#stream .value"), strict=True)
    )
    means = [float(ends[label].split(" ± ")[0]) for label in WITHOUT]
    assert (low, high) == (min(means), max(means))
    opened.press("ArrowLeft")
    assert opened.value(LINES) == len(DEMO) - len(WITHOUT) + 1


def test_methods_are_lines_where_none_has_a_memory(browser, tmp_path):
    made = {row: DEMO[row] for row in ("sgd", "adam", "ewcpp", "syngap, no replay")}
    write_page(
        read_runs(write_experiment(tmp_path, made, every=50)), tmp_path / "page.html", "none"
    )
    browser.open(tmp_path / "page.html")
    assert browser.value(LINES) == 4
    assert browser.value("document.querySelectorAll('#stream form').length") == 1
    assert browser.complaints() == []


def test_lines_have_their_names_at_their_ends(opened):
    names = "[...document.querySelectorAll('#stream g.line .name')].map((e) => e.textContent)"
    assert sorted(opened.value(names)) == sorted(
        ["DER++", "ER-ACE", "ER", "SynGAP", "Joint", "without a memory"]
    )
    boxes = opened.value("""[...document.querySelectorAll('#stream .line text')].map(
        (e) => { const { x, y, width } = e.getBBox(); return [x, y, width]; })""")
    boxes.sort(key=lambda box: box[1])
    for above, below in pairwise(boxes):
        assert below[1] - above[1] >= 13.9, "they do not overlap"
    plot = opened.value("document.querySelector('#stream .plot').clientWidth")
    assert max(x + width for x, _, width in boxes) <= plot
    assert max(x for x, *_ in boxes) - min(x for x, *_ in boxes) < 2


PIXELS = """(colours) => { const c = document.createElement('canvas').getContext('2d');
    return colours.map((colour) => { c.fillStyle = colour; c.fillRect(0, 0, 1, 1);
        return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); }); }"""


def linear(pixel):
    return [v / 3294.6 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in pixel]


def contrast(one, other):
    weights = (0.2126, 0.7152, 0.0722)
    light = [sum(map(float.__mul__, weights, linear(pixel))) + 0.05 for pixel in (one, other)]
    return max(light) / min(light)


def oklab(pixel):
    r, g, b = linear(pixel)
    long = (0.4122 * r + 0.5363 * g + 0.0514 * b) ** (1 / 3)
    middle = (0.2119 * r + 0.6807 * g + 0.1074 * b) ** (1 / 3)
    short = (0.0883 * r + 0.2817 * g + 0.6300 * b) ** (1 / 3)
    return (
        0.2105 * long + 0.7936 * middle - 0.0041 * short,
        1.9780 * long - 2.4286 * middle + 0.4506 * short,
        0.0259 * long + 0.7828 * middle - 0.8087 * short,
    )


def colours(browser, selector, name):
    found = f"[...document.querySelectorAll({selector!r})].map((e) => getComputedStyle(e).{name})"
    return browser.value(f"({PIXELS})({found})")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("rows_drawn", [len(DEMO), 13])
def test_lines_can_be_told_apart_by_colour(browser, demo, tmp_path, dark, rows_drawn):
    page = demo
    if rows_drawn > len(DEMO):  # as many as there are colours, and joint training
        more = {
            "extra": Made("er", options={"lr": 0.2}),
            "extra 2": Made("er", options={"lr": 0.4}),
        }
        runs = write_experiment(tmp_path, {**DEMO, **more}, (0,), every=50)
        page = tmp_path / "page.html"
        write_page(read_runs(runs), page, "more")
    browser.open(page, dark=dark)
    browser.click("#stream form:last-child label:last-of-type input")
    (paper,) = colours(browser, "body", "backgroundColor")
    lines = colours(browser, "#stream .plot .curve", "stroke")
    assert len(lines) == rows_drawn
    assert min(contrast(line, paper) for line in lines) >= 3
    pairs = combinations(map(oklab, lines), 2)
    assert min(dist(*pair) for pair in pairs) > 0.09
    names = colours(browser, "#stream .plot .name", "fill")
    assert min(contrast(name, paper) for name in names) >= 4.5


def test_large_experiment_draws_few_lines_first(browser, tmp_path):
    many = {
        f"er_{place}": Made(
            "er", 60 + place / 2, options={"lr": 0.1, "buffer": 200, "x": place % 9, "y": place}
        )
        for place in range(80)
    }
    runs = write_experiment(tmp_path, {**DEMO, **many}, (0,), every=50)
    write_page(read_runs(runs), tmp_path / "page.html", "many")
    for width in (400, 1400):
        browser.open(tmp_path / "page.html", width=width, height=900)
        assert 6 <= browser.value(LINES) <= 10
        assert browser.value("document.documentElement.scrollWidth") == width
        assert {"SynGAP", "DER++", "ER"} <= set(texts(browser, "#stream .plot .name"))
        assert browser.value("document.querySelector('.lead').offsetHeight") < 1500
    browser.click("#stream .key .at button")
    assert browser.value(LINES) == len(many) + len(DEMO) - len(WITHOUT) + 1
    assert browser.complaints() == []


def test_page_does_not_shift_while_values_are_read(browser, demo):
    browser.open(demo, width=1400)
    height = "document.documentElement.scrollHeight"
    before = browser.value(height)
    for across in (0.1, 0.3, 0.5, 0.9):
        browser.hover("#stream .plot", across=across)
        assert browser.value(height) == before
    browser.hover("#stream .plot .name")
    assert "hot" in browser.value(
        "document.querySelector('#stream .plot .name').parentNode.className.baseVal"
    )
    assert browser.value(height) == before


def test_pointer_and_arrow_keys_read_values(opened):
    value = "#stream .key li.ours .value"
    assert text(opened, "#stream .key .at span") == "at the end"
    last = text(opened, value)
    opened.hover("#stream .plot", across=0.3)
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
    opened.click("#stream form:last-child label:last-of-type input")
    drawn = "document.querySelector('#stream g.line[data-name=\"sgd\"] .curve').getAttribute('d')"
    mean = opened.value(drawn)
    opened.click("#stream .choices label:nth-of-type(2) input")
    assert opened.value(drawn) != mean
    assert "Accuracy on task 1" in text(opened, "#stream .note")
    assert opened.value("document.querySelectorAll('#stream .plot .own').length") == 1
    ends = dict(
        zip(texts(opened, "#stream .key .name"), texts(opened, "#stream .value"), strict=True)
    )
    assert float(ends["SGD"].split(" ± ")[0]) < 5 < 50 < float(ends["SynGAP"].split(" ± ")[0])


def test_plasticity_of_another_row_can_be_chosen(opened):
    label = "document.querySelector('#plasticity .plot').getAttribute('aria-label')"
    assert opened.value(label) == "Plasticity by layer, SynGAP"
    opened.click("#plasticity .choices label:nth-of-type(2) input")
    assert opened.value(label) == "Plasticity by layer, SynGAP, alone"
    assert texts(opened, "#plasticity .key .name")[:2] == ["whole network", "0.weight"]


def test_weights_or_norms_and_biases_can_be_chosen(opened):
    names = "#plasticity .maps figure:first-child tbody th"
    assert texts(opened, names) == ["0.weight", "2.weight", "4.weight"]
    opened.click("#plasticity form:nth-of-type(2) label:nth-of-type(2) input")
    assert texts(opened, names) == ["0.bias", "2.bias", "4.bias"]
    assert texts(opened, "#plasticity .key .name")[1:] == ["0.bias", "2.bias", "4.bias"]


def test_maps_of_tensors_tell_their_values(opened):
    importance, plasticity = (
        "#plasticity .maps figure:first-child",
        "#plasticity .maps figure:last-child",
    )
    opened.hover(f"{importance} tbody tr:nth-child(2) td:nth-child(4)")
    told = text(opened, f"{importance} .readout")
    assert told == "2.weight after task 3: 40.0"  # 1e-3 · (1 + 3) over the network's 1e-4
    opened.click(f"{plasticity} tbody tr:last-child td:last-child")
    assert re.fullmatch(r"4\.weight after task 5: 0\.\d\d", text(opened, f"{plasticity} .readout"))
    shades = [
        style(opened, f"{importance} tr:{place} td", "background-color")
        for place in ("first-child", "last-child")
    ]
    assert shades[0] != shades[1]


def test_arrow_keys_read_maps_of_tensors(opened):
    figure = "#plasticity .maps figure:first-child"
    opened.value(f"document.querySelector('{figure} table').focus()")
    opened.press("ArrowRight")
    assert text(opened, f"{figure} .readout").startswith("0.weight after task 1: ")
    opened.press("ArrowRight")
    opened.press("ArrowDown")
    assert text(opened, f"{figure} .readout").startswith("2.weight after task 2: ")
    assert opened.value(f"document.querySelectorAll('{figure} .shown').length") == 1


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


# What some experiments have: several rates of a method, landscapes, the paper's numbers


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    paper = {"experiment": "table1-cifar100-shared"}
    runs = write_experiment(folder / "runs", RATES, (0, 1), every=20, extra=paper)
    for row in ("sgd", "er", "syngap"):
        write_made_landscape(runs / "landscapes", row, row)
    found = read_runs(runs)
    write_page(found, folder / "page.html", "rates", read_landscapes(runs))
    return folder / "page.html"


@pytest.fixture(params=["desk", "phone"])
def rich(request, browser, full):
    with looked_at(browser, full, request.param, (1400, 400)) as page:
        yield page


def test_no_part_makes_the_page_scroll_sideways(browser, full):
    for width in (360, 400, 700, 1400):
        browser.open(full, width=width)
        assert browser.value("document.documentElement.scrollWidth") == width
        wider = """[...document.querySelectorAll("svg, canvas, figure, .maps")].filter(
            (e) => e.getBoundingClientRect().right > innerWidth + 1).length"""
        assert browser.value(wider) == 0


def test_rates_have_a_curve_that_the_pointer_reads(rich):
    assert text(rich, "#sweeps h2") == "What the learning rate does"
    assert texts(rich, "#sweeps .key .name") == ["ER", "SynGAP"]
    best = texts(rich, "#sweeps .key .value")
    assert re.fullmatch(r"\d+\.\d at 0\.1", best[0])
    assert re.fullmatch(r"\d+\.\d at 0\.3", best[1])
    rich.hover("#sweeps .plot", across=0.79)
    assert text(rich, "#sweeps .key .at span") == "learning rate 1"
    assert re.match(r"\d+\.\d", text(rich, "#sweeps .key li:first-child .value"))
    assert text(rich, "#sweeps .key li:last-child .value") == "–"  # SynGAP was not run at 1
    rich.hover("#sweeps .plot", across=0.02)
    assert text(rich, "#sweeps .key .at span") == "learning rate 0.03"
    assert text(rich, "#sweeps .key li:first-child .value") == "–"


def test_arrow_keys_read_the_curve_and_a_measure_can_be_chosen(rich):
    rich.value("document.querySelector('#sweeps .plot').focus()")
    rich.press("Home")
    said = "document.querySelector('#sweeps .plot').getAttribute('aria-valuetext')"
    assert rich.value(said).startswith("learning rate 0.03: ER –, SynGAP ")
    drawn = "document.querySelector('#sweeps .plot .curve').getAttribute('d')"
    accuracy = rich.value(drawn)
    rich.click("#sweeps .choices label:nth-of-type(2) input")
    assert rich.value(drawn) != accuracy
    assert "FM against learning rate" in text(rich, "#sweeps .note")


def test_rates_that_diverged_are_told(browser, tmp_path):
    runs = write_experiment(tmp_path / "runs", RATES, (0, 1), every=50)
    error = "FloatingPointError: the loss is not finite"
    for row, seed in (("er_lr1.0", 0), ("er_lr1.0", 1), ("syngap_lr0.03", 1)):
        write_run(runs, row, RATES[row], seed, state="failed", error=error)
    write_page(read_runs(runs), tmp_path / "page.html", "rates")
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []
    assert text(browser, "#sweeps .note").endswith(
        " Not over all seeds: ER at 1 (0 of 2 seeds, 2 diverged); "
        "SynGAP at 0.03 (1 of 2 seeds, 1 diverged)."
    )
    assert "0 of 2 seeds, 2 diverged" in texts(browser, "#results .few")
    assert "1" in texts(browser, "#sweeps .plot text"), "the rate has its place on the axis"


def test_rows_at_other_rates_wait_to_be_asked_for(rich):
    shown = "document.querySelectorAll('#stream .plot g.line').length"
    assert rich.value(shown) == 3
    rich.click("#stream .key .at button")
    assert rich.value(shown) == len(RATES)
    assert texts(rich, "#matrices .body > .matrices figcaption") == ["SynGAP", "ER", "SGD"]
    rich.click("#matrices summary")
    rich.wait_for("document.querySelector('#matrices details').open")
    assert texts(rich, "#matrices details figcaption") == [
        "ER, lr 0.3",
        "SynGAP, lr 0.03",
        "ER, lr 1.0",
    ]


def test_papers_numbers_stand_below_ours(rich):
    line = "#results tbody:first-of-type tr.ours"
    assert "27.28" in text(rich, f"{line} td .paper")
    assert "27.28" not in text(rich, f"{line} td .mean")
    assert "its setting is not this one" in text(rich, "#quoted")
    assert rich.value("document.querySelectorAll('#results .paper').length") == 3 * (1 + 3)


def test_surface_is_painted_from_basin_to_highland(rich):
    rich.wait_for("document.querySelector('#landscapes canvas').style.width !== ''")
    # Once: a canvas that is read often complains.
    pixels = """(() => { const c = document.querySelector('#landscapes canvas');
        const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return [[0.5, 0.5], [0.75, 0.5], [0.03, 0.03]].map(([across, down]) => {
            const at = 4 * (Math.floor(c.height * down) * c.width + Math.floor(c.width * across));
            return [...all.slice(at, at + 3)].join(" "); }); })()"""
    basin, slope, high = rich.value(pixels)
    assert len({basin, slope, high}) == 3
    assert style(rich, "#landscapes .levels span", "--band") == f"rgb({basin})"
    assert rich.value("document.querySelectorAll('#landscapes figure').length") == 3
    assert texts(rich, "#landscapes figcaption") == ["SGD", "ER", "SynGAP"]


def test_surface_tells_the_loss_under_the_pointer(rich):
    figure = "#landscapes figure:last-child"
    resting = text(rich, f"{figure} .readout")
    assert resting == "Loss 2.30 at the start, 0.010 after task 1, 1.50 after task 2"
    assert texts(rich, f"{figure} .label") == ["start", "task 1", "task 2"]
    rich.hover(f"{figure} canvas")  # its middle is task 1
    assert text(rich, f"{figure} .readout") == "Loss 0.010, accuracy 99.0 % at 0.00, 0.00"
    assert rich.value(f"document.querySelectorAll('{figure} .here').length") == 2
    rich.value(f"document.querySelector('{figure} svg').focus()")
    rich.press("ArrowUp")
    assert text(rich, f"{figure} .readout").endswith("at 0.00, 0.25")
    for _ in range(4):
        rich.press("ArrowRight")
        rich.press("ArrowUp")
    assert text(rich, f"{figure} .readout").startswith("Loss beyond all bounds")


def test_random_directions_can_be_shown(rich):
    path = "document.querySelector('#landscapes .way:not(.halo)').getBBox().height"
    assert rich.value(path) > 50
    rich.click("#landscapes .choices label:nth-of-type(2) input")
    assert rich.value(path) == 0
    assert texts(rich, "#landscapes figure:first-child .label") == ["start, task 1, task 2"]
    assert texts(rich, "#landscapes .note:not([hidden])")[0].startswith("Around the network")


def test_everything_is_drawn_before_the_first_frame(browser, full):
    browser.open(full)
    no_frame = "window.ResizeObserver = class { observe() {} };"  # its calls come with frames
    browser.send("Page.addScriptToEvaluateOnNewDocument", source=no_frame)
    browser.send("Page.reload")
    browser.wait_for("!('unobserve' in ResizeObserver.prototype)")
    browser.wait_for("document.readyState === 'complete'")
    assert browser.value("document.querySelectorAll('#landscapes .way:not(.halo)').length") == 3
    assert browser.value("document.querySelectorAll('#sweeps .plot path').length") > 0


def test_surface_follows_a_change_of_the_system(browser, full):
    browser.open(full)
    canvas = "document.querySelector('#landscapes canvas').getContext('2d')"
    pixel = f"[...{canvas}.getImageData(9, 9, 1, 1).data].join()"
    light = browser.value(pixel)
    browser.darken()
    browser.wait_for(f"{pixel} !== {light!r}")


def test_landscapes_alone_make_a_page(browser, tmp_path):
    write_made_landscape(tmp_path, "er", "er", random=False)
    write_page([], tmp_path / "page.html", "alone", read_landscapes(tmp_path))
    browser.open(tmp_path / "page.html")
    shown = "[...document.querySelectorAll('section:not([hidden])')].map((e) => e.id)"
    assert browser.value(shown) == ["landscapes"]
    assert texts(browser, "#landscapes .choices label") == []
    assert browser.complaints() == []


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
    assert "ER (a</h2>)" in texts(browser, "#matrices figcaption")
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "page.html").as_uri()]


def test_rows_that_have_not_begun_are_in_the_table(browser, tmp_path):
    made = {row: DEMO[row] for row in ("sgd", "er", "syngap")}
    runs = write_experiment(tmp_path / "runs", made, (0, 1), every=50)
    for name in ("sgd-0", "sgd-1", "er-1"):
        shutil.rmtree(runs / name)
    write_page(read_runs(runs), tmp_path / "page.html", "stopped")
    browser.open(tmp_path / "page.html")
    assert sorted(texts(browser, "#results .few")) == ["0 of 2 seeds", "1 of 2 seeds"]
    assert texts(browser, "#missing li") == [
        "SGD, seeds 0, 1: not begun",
        "ER, seed 1: not begun",
    ]
    assert browser.complaints() == []


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
