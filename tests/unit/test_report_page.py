"""The page: numbers reach it, nothing escapes it, it asks the world for nothing, and it survives a killed run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.report import write_report
from crosstune.report.metric import display_of

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = "<script>alert('x')</script> & \"quoted\" </pre><img src=//evil.example/x onerror=alert(1)>"


class Page(HTMLParser):
    """Every element with its attributes, the text of scripts and styles, and whether tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[self.open[-1]] = self.raw.get(self.open[-1], "") + data
        else:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)


def evaluation(step: int, when: str, loss: float, match: float, answer: str) -> dict:
    sample = {"prompt": HOSTILE, "answer": answer, "reference": "yes"}
    metrics = {"loss": loss, "exact_match": match, "<b>odd</b>": 7.0}
    return {
        "time": 1.7e9 + step,
        "kind": "evaluation",
        "step": step,
        "when": when,
        "metrics": metrics,
        "samples": [sample],
    }


def make_run(folder: Path, *, num_steps: int = 40, without: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    plan = {
        "name": "demo",
        "created": "2025-11-03T14:03:22+01:00",
        "command": ["crosstune", "train", "--name", "it's <mine>"],
        "asked": {"backend": "auto", "lr": 0.0002, "note": HOSTILE},
        "options": {"backend": "cpu", "lr": 0.0002, "note": HOSTILE, "lora_rank": 16},
        "backend": "cpu",
        "engine": "torch",
        "method": "lora",
        "quantizer": "none",
        "precision": "bf16",
        "num_steps": num_steps,
        "adjustments": [
            {"option": "backend", "asked": "auto", "used": "cpu", "reason": "no GPU <here>", "kind": "choice"}
        ],
        "model": {
            "name": "tiny/model",
            "path": "/models/tiny",
            "source": "hub",
            "identity": {"sha256": "abc123"},
        },
        "data": {
            "dataset": "commands",
            "train": {"examples": 320, "tokens": 1234567},
            "deep": {"a": {"b": [1]}},
        },
        "machine": {
            "name": "tuna",
            "num_cores": 2,
            "memory_total_bytes": 8 * 2**30,
            "versions": {"torch": "2.8.0"},
            "backends": {
                "cpu": {"available": True, "devices": [{"name": "CPU", "memory_total_bytes": 8 * 2**30}]}
            },
        },
    }
    metrics = [
        {
            "step": n,
            "loss": 3 / n,
            "tokens": 100,
            "supervised_tokens": 40,
            "lr": 2e-4,
            "grad_norm": 1.0,
            "step_s": 0.5,
        }
        | {"tokens_per_s": 200.0, "memory_bytes": 2**30}
        for n in range(1, num_steps + 1)
    ]
    events = [
        evaluation(0, "before", 3.2143217, 0.0, "no"),
        {"time": 1.7e9, "kind": "warning", "message": f"careful {HOSTILE}"},
        evaluation(num_steps, "after", 0.0412345, 0.95, "yes"),
        {"time": 1.7e9, "kind": "<i>new</i>", "detail": HOSTILE},
    ]
    summary = {
        "status": "finished",
        "steps": num_steps,
        "tokens": 634880,
        "supervised_tokens": 240840,
        "eval_before": {"loss": 3.2143217, "exact_match": 0.0},
        "eval_after": {"loss": 0.0412345, "exact_match": 0.95},
        "tokens_per_s": 38211.4,
        "peak_memory_bytes": 2 * 2**30,
        "seconds": 33.4,
        "trained_parameters": 4884480,
        "parameters": 139399488,
    }
    texts = {
        "config.yaml": "backend: auto\nlr: 0.0002\n",
        "plan.json": json.dumps(plan),
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in metrics),
        "events.jsonl": "".join(json.dumps(row) + "\n" for row in events),
        "summary.json": json.dumps(summary),
    }
    for name, text in texts.items():
        if name not in without:
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def render_page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_numbers_reach_the_page(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    words = page.words()
    for text in (
        "demo",
        "finished",
        "tiny/model",
        "commands",
        "3.21",
        "0.0412",
        "−98.7 %, better",
        "+95.0 points, better",
        "634,880",
        "240,840 carry loss",
        "38,211 tok/s",
        "2.00 GiB",
        "25 % of 8.00 GiB",
        "4.88 M",
        "3.5 % of 139 M",
        "33.4 s",
        "2025-11-03 14:03 UTC+01:00",
        "no GPU <here>",
        "abc123",
        "before 0 of 1; after, the best 1 of 1.",
        "1.23 M",
    ):
        assert text in words, text
    titles = {attributes["title"] for _, attributes in page.elements if attributes.get("title")}
    assert {
        "0.0412345",
        "3.2143217",
        "4,884,480",
        "1,234,567",
        "2,147,483,648 bytes",
        "33.400 seconds",
    } <= titles
    assert "--name 'it'\"'\"'s <mine>'" in page.text


def test_nothing_a_run_recorded_becomes_markup(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    assert page.open == []
    assert page.count("script") == 1
    assert page.count("img") == page.count("i") == 0
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 4


def test_the_page_asks_the_world_for_nothing(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action", "data", "style"} & set(attributes)
        target = attributes.get("href") or "#"
        assert target.startswith("#") or target == "data:,"
    for text in page.raw.values():
        assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest", text)


def test_the_policy_allows_only_the_pages_own_style_and_script(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for text in page.raw.values():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "summary.json"]
)
def test_any_one_file_may_be_missing(tmp_path: Path, name: str) -> None:
    page = render_page(make_run(tmp_path / "run", without=(name,)))
    assert page.open == []
    # A run without a summary that wrote a moment ago is still going: nothing is missing yet.
    assert (f"{name} is missing:" in page.words()) == (name != "summary.json")
    assert ("running" in page.words()) == (name == "summary.json")


def test_a_configuration_alone_makes_a_page(tmp_path: Path) -> None:
    everything_else = ("plan.json", "metrics.jsonl", "events.jsonl", "summary.json")
    words = render_page(make_run(tmp_path / "run", without=everything_else)).words()
    assert "No evaluation is recorded" in words
    assert "No finite value is recorded for: Loss" in words


def test_no_run_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_steps", [1, 2, 13])
def test_short_runs_draw(tmp_path: Path, num_steps: int) -> None:
    page = render_page(make_run(tmp_path / "run", num_steps=num_steps))
    plots = [
        attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("class") == "plot"
    ]
    # The loss also over a logarithmic axis; the evaluated loss is in the same chart.
    assert len(plots) == 8
    assert all(attributes["aria-label"] for attributes in plots)


def test_nulls_are_gaps_and_a_failure_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=3)
    rows = [{"step": 1, "loss": 2.0, "lr": None}, {"step": 2, "loss": None}, {"step": 3, "loss": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "status": "failed",
        "error": "the loss <is> gone",
        "eval_before": {"loss": 3.2},
        "eval_after": {"loss": None},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    words = render_page(folder).words()
    assert "2 steps without a finite value" in words
    assert "last not finite lowest 2.00" in words
    assert "No finite value is recorded for: Learning rate" in words
    assert "Failed. the loss <is> gone" in words


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=5000)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[3333]["loss"] = 77.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_report(folder)
    assert report.stat().st_size < 400_000
    assert "highest 77.0" in Page(report.read_text(encoding="utf-8")).words()


def test_spacing_alone_is_no_match_but_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "events.jsonl").write_text(json.dumps(evaluation(0, "before", 1.0, 0.0, "yes\n")) + "\n")
    words = render_page(folder).words()
    assert "✕ no match: only spacing differs" in words


def test_free_answers_are_shown_without_a_verdict(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for row in rows:
        row.get("metrics", {}).pop("exact_match", None)
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = render_page(run).words()
    assert "reference" in words
    assert not re.search(r"✓ match|no match|Exact matches", words)


def test_an_adjustment_in_plan_and_events_is_shown_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    adjustment = json.loads((folder / "plan.json").read_text())["adjustments"][0]
    later = adjustment | {"option": "batch_size", "asked": 8, "used": 4, "reason": "out of memory"}
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps(item | {"time": 1.7e9, "kind": "adjustment", "sort": item["kind"]}) + "\n"
            for item in (adjustment, later)
        )
    )
    html = write_report(folder).read_text(encoding="utf-8")
    assert html.count('<td class="why">') == 2
    assert "No warnings and no errors." in html


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "adjustment", "option": "backend", "sort": "warning", "sentence": "the CPU is slow"},
        {"kind": "start", "data": {"warnings": ["the CPU is slow"]}},
        {"kind": "warning", "message": "the CPU is slow"},
    ],
    ids=lambda event: event["kind"],
)
def test_every_warning_is_among_the_warnings(event: dict, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "events.jsonl").write_text(json.dumps({"time": 1.7e9} | event) + "\n")
    html = write_report(folder).read_text(encoding="utf-8")
    assert "No warnings" not in html
    assert "the CPU is slow" in html[html.index("Warnings and errors") :]


def test_answers_are_marked_only_where_matches_are_measured(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    event = evaluation(0, "before", 1.0, 0.0, "free words")
    del event["metrics"]["exact_match"]
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    words = render_page(folder).words()
    assert "free words" in words and "no match" not in words


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    line = json.dumps(evaluation(0, "before", 1.0, 0.0, "\ud800 日本語"))
    (folder / "events.jsonl").write_text(line + "\n")
    assert "\\ud800 日本語" in render_page(folder).text


def test_control_characters_are_escaped_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    line = json.dumps(evaluation(0, "before", 1.0, 0.0, "\x1b]52;c;aGk=\x07 \x9b2J \u202eleft"))
    (folder / "events.jsonl").write_text(line + "\n")
    page = render_page(folder)
    assert "\\x1b]52;c;aGk=\\x07 \\x9b2J \\u202eleft" in page.text
    assert not set(write_report(folder).read_text(encoding="utf-8")) & set("\x1b\x07\x9b\u202e")


def test_writing_replaces_the_page_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    (folder / "report.html").write_text("old")
    assert write_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}
    assert (folder / "report.html").read_text(encoding="utf-8") != "old"


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("token_accuracy", 1),
        ("shuffled_accuracy", 0),
        ("zero_accuracy", 0),
        ("nats_per_token", -1),
        ("chrf", 1),
    ],
)
def test_a_control_has_no_better_direction(name: str, better: int) -> None:
    assert display_of(name, [0.2, 0.3]).better == better
