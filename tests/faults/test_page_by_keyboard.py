"""The page in a real browser without a mouse, its contrast in light and dark, and a list of 200 runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run
from test_page_in_a_browser import Browser, browser, page, pytestmark  # noqa: F401

keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys
chains = pytest.importorskip("selenium.webdriver.common.action_chains")

VIEWS = ("#/", "#/group/rates", "#/run/first", "#/compare/first/second", "#/new", "#/chat", "#/jobs")
ACTIVE = "a[href], button:not(:disabled), input, select, textarea, summary, [tabindex='0']"
SHOWN = f"[...document.querySelectorAll({json.dumps(ACTIVE)})].filter((each) => each.checkVisibility() && each.tabIndex >= 0)"
MOST_TABS = 150
CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const parse = (text) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
  const value = colour[i] / 255;
  return sum + share * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
}, 0);
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !element.checkVisibility() || element.closest(':disabled, option, noscript, .skip')) continue;
  const chain = [];
  for (let each = element; each; each = each.parentElement) chain.unshift(getComputedStyle(each));
  let below = parse('Canvas');
  let opacity = 1;
  for (const style of chain) { below = over(parse(style.backgroundColor), below); opacity *= Number(style.opacity); }
  const own = getComputedStyle(element);
  const ink = parse(element instanceof SVGElement ? own.fill : own.color);
  const text = over([...ink.slice(0, 3), ink[3] * opacity], below);
  const [high, low] = [light(text), light(below)].sort((a, b) => b - a);
  found.push([(high + 0.05) / (low + 0.05), `${element.tagName}.${element.className} ${walk.currentNode.data.trim().slice(0, 40)}`]);
}
return found;
"""


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Browser]:  # noqa: F811
    """A browser at the list of two runs and a sweep."""
    runs = tmp_path / "runs"
    runs.mkdir()
    make_run(runs / "first")
    make_run(runs / "second", num_steps=20)
    (runs / "first" / "checkpoints" / "step-00000040").mkdir(parents=True)
    (runs / "first" / "checkpoints" / "step-00000040" / "manifest.json").write_text("{}")
    (runs / "rates" / "trials").mkdir(parents=True)
    make_run(runs / "rates" / "trials" / "trial-000")
    trials = [
        {"name": f"trial-{n:03d}", "number": n, "status": status, "value": 0.5 + n, "step": 40, "params": {"lr": 0.1, "wd": n}}
        for n, status in enumerate(("finished", "pruned", "failed"))
    ]  # fmt: skip
    over = {"lr": {"low": 0.01, "high": 0.1, "is_log": True}, "wd": {"choices": [0, 1, 2]}}
    found = {"metric": "eval_loss", "over": over, "trials": trials, "best": "trial-000", "importance": {"lr": 0.7, "wd": 0.3}}  # fmt: skip
    (runs / "rates" / "sweep.json").write_text(json.dumps(found))
    with page(runs) as (_, url, _):
        browser.size(1280)
        browser.driver.get(url)
        browser.until("document.querySelectorAll('.runs tbody tr').length === 2")
        yield browser
        browser.check_quiet()


def press(browser: Browser, *names: Any) -> None:  # noqa: F811
    chains.ActionChains(browser.driver).send_keys(*names).perform()


def look(browser: Browser, name: str, value: str) -> None:  # noqa: F811
    media = {"features": [{"name": name, "value": value}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def show(browser: Browser, view: str) -> None:  # noqa: F811
    """Open a view and wait until nothing of it changes."""
    browser.go(view)
    browser.until(f"location.hash === {json.dumps(view)} && document.querySelector('.view h1')")
    before, size = -1, 0
    while size != before:
        time.sleep(1.0)
        before, size = size, browser.run("return document.body.innerHTML.length")


@pytest.mark.parametrize("width", [1280, 390])
def test_every_control_is_reached_by_tab_and_its_focus_is_seen(opened: Browser, width: int) -> None:
    opened.size(width)
    look(opened, "prefers-reduced-motion", "reduce")  # the page scrolls to the focus at once
    for view in VIEWS:
        show(opened, view)
        opened.run(
            f"{SHOWN}.forEach((each, place) => {{ each.dataset.place = place; }}); document.activeElement.blur()"
        )
        wanted = opened.run(
            f"return {SHOWN}.filter((each) => !each.closest('.view [name]:not(:checked)')).map((each) => each.dataset.place)"
        )
        reached, unseen = set(), []
        for _ in range(MOST_TABS):
            press(opened, keys.TAB)
            at, is_seen, said = opened.run(
                "const each = document.activeElement; const style = getComputedStyle(each); const box = each.getBoundingClientRect();"
                "const scope = each.matches('.switch') ? each : null;"
                "return [each.dataset.place, Boolean(scope) || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 "
                "&& box.right > 0 && box.left < innerWidth && box.bottom > 0 && box.top < innerHeight), each.outerHTML.slice(0, 120)]"
            )
            if at in reached and at is not None:  # None: the document, and a table that scrolls
                break
            reached.add(at)
            if not is_seen and at is not None:
                unseen.append(said)
        assert unseen == [], view
        lost = [
            opened.run("return document.querySelector(`[data-place='${arguments[0]}']`)?.outerHTML.slice(0, 120)", each)
            for each in wanted if each not in reached
        ]  # fmt: skip
        assert [each for each in lost if each] == [], view


def test_runs_are_compared_read_and_asked_about_with_keys_alone(opened: Browser) -> None:
    opened.run("document.querySelector('.runs tbody input').focus()")
    for _ in range(2):
        press(opened, keys.SPACE, keys.TAB, keys.TAB)
    opened.until("document.querySelectorAll('.runs :checked').length === 2")
    opened.run(
        "[...document.querySelectorAll('.tools button')].find((each) => each.textContent === 'Compare 2').focus()"
    )
    press(opened, keys.ENTER)
    opened.until(
        "location.hash.startsWith('#/compare/') && document.querySelectorAll('.plot-box .uplot').length"
    )
    # A chart is read and zoomed.
    opened.run("document.querySelector('.plot-box').focus()")
    press(opened, keys.ARROW_LEFT)
    value = "document.querySelector('.u-legend .u-value').textContent"
    first = opened.until(value)
    press(opened, keys.ARROW_LEFT)
    opened.until(f"{value} !== {json.dumps(first)}")
    press(opened, "+")
    opened.until("document.querySelector('figcaption > .toggle:not([hidden])')?.textContent === 'whole run'")
    press(opened, keys.ESCAPE)
    opened.until("document.querySelector('figcaption > .toggle').hidden")
    # A dialog opens, keeps the focus, and Escape closes it without a request.
    show(opened, "#/run/first")
    opened.run(
        "[...document.querySelectorAll('.tools button')].find((each) => each.textContent === 'Extend').focus()"
    )
    press(opened, keys.ENTER)
    opened.until("document.querySelector('dialog[open]')?.contains(document.activeElement)")
    press(opened, keys.ESCAPE)
    opened.until("!document.querySelector('dialog')")
    assert opened.run("return document.activeElement.textContent") == "Extend"
    show(opened, "#/jobs")
    assert "No jobs." in opened.run("return document.body.innerText")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_contrast(opened: Browser, theme: str) -> None:
    look(opened, "prefers-color-scheme", theme)
    for view in VIEWS:
        show(opened, view)
        opened.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        found = opened.run(CONTRAST)
        assert len(found) > 5, view
        assert [row for row in found if row[0] < 4.5] == [], view


def test_long_names_stay_beside_their_marks(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    names = [f"2026-01-02-030405-a-model-with-a-long-name-instruct-{number}" for number in range(2)]
    (tmp_path / "runs").mkdir()
    for name in names:
        make_run(tmp_path / "runs" / name)
    with page(tmp_path / "runs") as (_, url, _):
        browser.size(390)
        browser.driver.get(url)
        show(browser, f"#/compare/{names[0]}/{names[1]}")
        tops = browser.run(
            "return [...document.querySelectorAll('.u-legend .u-series:nth-child(n + 2)')].map((each) =>"
            "['.u-marker', '.u-label'].map((part) => each.querySelector(part).getBoundingClientRect().top))"
        )
        assert len(tops) >= 2
        assert all(max(row) - min(row) < 10 for row in tops), tops
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_two_hundred_runs_are_listed_at_once_and_rows_stay(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    for number in range(200):
        make_run(tmp_path / "many" / f"run-{number:03d}", num_steps=3) if number else (
            tmp_path / "many"
        ).mkdir()
    with page(tmp_path / "many") as (_, url, _):
        browser.driver.get(url)
        browser.until("document.querySelectorAll('.runs tbody tr').length === 199")
        paint = browser.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        rows = browser.run("return performance.getEntriesByType('resource').find((each) => each.name.endsWith('/api/runs')).responseEnd")  # fmt: skip
        assert 0 < paint < rows, "the page is painted before the runs are read"
        browser.run("document.querySelectorAll('.runs tbody tr').forEach((each) => { each.kept = true; })")
        make_run(tmp_path / "many" / "newest")
        browser.until("document.querySelectorAll('.runs tbody tr').length === 200")
        assert (
            browser.run(
                "return [...document.querySelectorAll('.runs tbody tr')].filter((each) => !each.kept).length"
            )
            < 20
        )
        assert browser.run("return document.querySelector('.runs tbody tr').dataset.run") == "newest"
