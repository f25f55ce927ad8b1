"""The page in a real browser: every journey on a tiny model, wide and narrow, and kills of the server and of the run.

CROSSTUNE_SHOTS=FOLDER in the environment keeps screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="chromium and chromedriver are not installed"),
]
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytest.importorskip("uvicorn", reason="an extra: pip install 'crosstune[ui]'")
pytest.importorskip("xllamacpp", reason="an extra: pip install 'crosstune[llamacpp]'")

WAIT_S = 300.0
SHOTS = os.environ.get("CROSSTUNE_SHOTS")
HOSTILE = "<img src=x onerror=document.title='broken'>"


class Browser:
    """A browser whose steps wait for what they need to see."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.num_shots = 0

    def run(self, script: str, *words: Any) -> Any:
        return self.driver.execute_script(script, *words)

    def until(self, script: str) -> Any:
        """Wait until an expression of the page is true."""
        end = time.monotonic() + WAIT_S
        while not (found := self.run(f"return {script}")):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{script} is not true; the page says:\n{self.run('return document.body.innerText')}"
                )
            time.sleep(0.2)
        return found

    def go(self, view: str) -> None:
        self.run("location.hash = arguments[0]", view)

    def press(self, text: str, inside: str = "body") -> None:
        find = f"[...document.querySelectorAll({json.dumps(inside + ' button, ' + inside + ' a.button')})].filter((each) => each.textContent.trim() === {json.dumps(text)} && !each.disabled)"
        self.until(f"{find}.length")
        self.run(f"{find}[0].click()")

    def fill(self, **values: str) -> None:
        for name, text in values.items():
            self.until(f"document.getElementById('option-{name}')")
            self.run(
                "const each = document.getElementById(`option-${arguments[0]}`); each.value = arguments[1];"
                "each.dispatchEvent(new Event(each.tagName === 'SELECT' ? 'change' : 'input'))",
                name, text,
            )  # fmt: skip

    def status(self, *names: str) -> str:
        return self.until(
            f"{json.dumps(names)}.find((name) => document.querySelector(`.head h1 .badge.${{name}}`)) && document.querySelector('.head h1 .badge').className.split(' ')[1]"
        )

    def steps(self) -> int:
        """Return the step that the page of a running run shows."""
        return int(
            self.run(
                "return parseInt(document.querySelector('.live-line dd')?.textContent.replaceAll(',', '')) || 0"
            )
        )

    def size(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def shot(self, name: str) -> None:
        """Check that the view does not scroll sideways, wide or narrow; keep pictures if asked for."""
        self.num_shots += 1
        for width in (1400, 390):
            self.size(width)
            assert self.run("return document.documentElement.scrollWidth <= innerWidth"), (name, width)
            if SHOTS:
                self.driver.save_screenshot(str(Path(SHOTS) / f"{width}-{self.num_shots:02}-{name}.png"))

    def check_quiet(self) -> None:
        """Check that no script failed and that the policy refused nothing. A lost server is logged by the network."""
        rows = [row for row in self.driver.get_log("browser") if row["source"] != "network"]
        assert [row["message"] for row in rows if row["level"] == "SEVERE"] == []


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    )
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        driver.set_script_timeout(WAIT_S)
        yield Browser(driver)
    finally:
        driver.quit()


@contextmanager
def page(folder: Path, *, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Serve a folder with the command; yield the process, the address and the port."""
    words = [
        sys.executable,
        "-m",
        "crosstune",
        "ui",
        "--output_dir",
        str(folder),
        "--port",
        str(port),
        "--no_browser",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/\S+", line)
            assert found is not None, line
            yield server, found[0], int(found[1])
        finally:
            server.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The runs folder; what the page started there is ended after the test."""
    runs = tmp_path / "runs"
    runs.mkdir()
    yield runs
    for record in runs.glob(".ui/*/job.json"):
        job = json.loads(record.read_text())
        for process in [each for each in psutil.process_iter() if each.pid == job["pid"]]:
            if abs(process.create_time() - job["created"]) < 1:
                os.killpg(process.pid, signal.SIGKILL)


def wait(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the complete lines: the last one may be half written."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_prompts_are_previewed_without_a_share_of_supervised_tokens(browser: Browser, folder: Path) -> None:
    data = folder / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "Add {n}", "answer": "7"}}\n' for n in range(9)))
    with page(folder) as (_, url, _):
        browser.driver.get(url)
        browser.go("#/new")
        browser.fill(recipe="rl", model_name="tiny-random", dataset=str(data))
        browser.press("Preview the data")
        browser.until("document.querySelector('.preview pre')?.textContent.includes('Add')")
        text = browser.run("return document.querySelector('.preview').innerText")
        assert "duplicates" in text and "prompts with answer" in text
        assert "NaN" not in text and "supervised" not in text
        browser.check_quiet()


def test_every_journey_and_every_kill(browser: Browser, folder: Path) -> None:
    with page(folder) as (server, url, port):
        browser.driver.get(url)
        browser.until("document.querySelector('.empty h2')?.textContent === 'No runs yet.'")
        assert "token" not in browser.run("return location.href")
        browser.shot("empty")

        # A form with values that cannot work, then one that can, with its plan and its data.
        browser.go("#/new")
        browser.fill(
            model_name="tiny-random",
            max_steps="100000",
            save_steps="20",
            eval_steps="20",
            name="first",
            lr="fast",
        )
        browser.until(
            "document.querySelector('[data-option=lr] .problem:not([hidden])')?.textContent.includes('lr')"
        )
        browser.fill(lr="5e-3")
        browser.until("document.querySelector('.plan dl dd')?.textContent.includes('iB of')")
        assert "--lr 5e-3" in browser.run("return document.getElementById('command').textContent")
        browser.press("Preview the data")
        browser.until("document.querySelector('.preview pre mark')?.textContent.includes('action')")
        browser.shot("form-plan-data")

        # It runs, its curve moves, and a refresh in the middle loses nothing.
        browser.press("Start")
        browser.until("location.hash === '#/run/first'")
        browser.status("running")
        before = wait(browser.steps)
        wait(lambda: browser.steps() > before + 2)
        browser.until("document.querySelectorAll('.uplot').length > 3")
        browser.shot("running")
        browser.driver.refresh()
        browser.status("running")
        assert wait(browser.steps) > before
        browser.until("document.querySelectorAll('.uplot').length > 3")

        # kill -9 of the server: the run goes on, and the open page continues with a new server.
        server.kill()
        server.wait()
        browser.until("!document.getElementById('offline').hidden")
        done = len(rows(folder / "first"))
        wait(lambda: len(rows(folder / "first")) > done + 2)
    with page(folder, port=port):
        browser.until("document.getElementById('offline').hidden")
        done = len(rows(folder / "first"))
        wait(lambda: browser.steps() > done)

        # Stopped with a checkpoint, resumed, killed while the page is open, resumed again.
        browser.press("Stop")
        assert browser.status("stopped") == "stopped"
        browser.until("document.body.innerText.includes('from the last checkpoint')")
        browser.shot("stopped")
        stopped = rows(folder / "first")[-1]["step"]
        browser.press("Resume")
        browser.status("running")
        wait(lambda: browser.steps() > stopped)
        wait(lambda: any((folder / "first" / "checkpoints").glob("step-*")))
        [job] = [
            found for record in folder.glob(".ui/*/job.json")
            if "--resume" in (found := json.loads(record.read_text()))["command"]
        ]  # fmt: skip
        os.kill(job["pid"], signal.SIGKILL)
        assert browser.status("killed") == "killed"
        browser.until("document.body.innerText.includes('killed')")
        browser.shot("killed")
        assert [row["step"] for row in rows(folder / "first")] == list(
            range(1, len(rows(folder / "first")) + 1)
        )

        # A short second run from a copy of the first.
        browser.press("Copy as new")
        browser.until("document.getElementById('option-model_name')?.value === 'tiny-random'")
        browser.fill(max_steps="12", name="second")
        browser.until("document.getElementById('command')?.textContent.includes('--max_steps 12')")
        browser.shot("form")
        browser.press("Start")
        browser.until("location.hash === '#/run/second'")
        browser.status("finished")
        browser.until("document.querySelectorAll('.uplot').length > 3")
        browser.until("document.querySelector('#verdict')")
        browser.until("document.querySelector('#next .copy')")
        browser.shot("run")

        # It trains longer.
        browser.press("Extend")
        browser.until("document.getElementById('ask-max_steps')?.value === '24'")
        browser.run("document.getElementById('ask-max_steps').value = 16")
        browser.press("Train", "dialog")
        wait(lambda: rows(folder / "second")[-1]["step"] == 16)
        summary = folder / "second" / "summary.json"
        wait(lambda: summary.is_file() and json.loads(summary.read_text())["steps"] == 16)
        browser.until("document.querySelector('.totals')?.textContent.includes('16')")
        browser.status("finished")

        # Both are compared, from the list.
        browser.go("#/")
        browser.until("document.querySelectorAll('.runs tbody tr').length === 2")
        browser.shot("list")
        browser.run("document.querySelectorAll('.runs input[type=checkbox]').forEach((each) => each.click())")
        browser.press("Compare 2")
        browser.until("document.querySelectorAll('.uplot').length > 1")
        browser.until("document.querySelector('#options')?.textContent.includes('max_steps')")
        browser.shot("compare")

        # Both the run and its base answer, streamed, in one window.
        browser.go("#/chat/second")
        browser.until("document.getElementById('second-model')?.value === 'tiny-random'")
        browser.press("Load")
        browser.until("document.querySelector('.composer textarea')")
        browser.run(
            "document.querySelector('.settings label:nth-child(2) input').value = 12; document.querySelector('.composer textarea').value = arguments[0]",
            HOSTILE,
        )
        browser.press("Send", ".composer")
        browser.until("document.querySelectorAll('.turn.assistant[data-done]').length === 2")
        texts = browser.run("return [...document.querySelectorAll('.turn')].map((each) => each.textContent)")
        assert texts.count(HOSTILE) == 2
        assert all(texts)
        browser.shot("chat")
        browser.press("Unload")
        browser.until("document.querySelector('.models')")

        # Exported and merged as jobs.
        browser.go("#/run/second")
        browser.press("Export", ".head")
        browser.press("Export", "dialog")
        browser.until("document.querySelector('.job')?.textContent.includes('export')")
        browser.until("document.querySelector('.job').dataset.state === 'done'")
        assert (folder / "second" / "hf").is_dir()
        browser.shot("jobs")
        assert browser.run("return document.title").endswith("crosstune")
        browser.check_quiet()
