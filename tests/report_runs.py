"""Run folders for tests of the report, and a reader of its pages."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from crosstune.report import write_report

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
    metrics = {"loss": loss, "exact_match": match, "<b>odd</b>": 7.0}
    samples = [{"prompt": HOSTILE, "answer": answer, "reference": "yes"}]
    row = {"time": 1.7e9 + step, "kind": "evaluation", "step": step, "when": when}
    return row | {"metrics": metrics, "samples": samples}


PLAN: dict[str, Any] = {
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
    "adjustments": [
        {"option": "backend", "asked": "auto", "used": "cpu", "reason": "no GPU <here>", "kind": "choice"}
    ],
    "model": {"name": "tiny/model", "path": "/m", "source": "hub", "identity": {"sha256": "abc123"}},
    "data": {"dataset": "commands", "train": {"examples": 320, "tokens": 1234567}, "deep": {"a": {"b": [1]}}},
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
SUMMARY: dict[str, Any] = {
    "status": "finished",
    "tokens": 634880,
    "supervised_tokens": 240840,
    "seconds": 33.4,
    "eval_before": {"loss": 3.2143217, "exact_match": 0.0},
    "eval_after": {"loss": 0.0412345, "exact_match": 0.95},
    "tokens_per_s": 38211.4,
    "peak_memory_bytes": 2 * 2**30,
    "trained_parameters": 4884480,
    "parameters": 139399488,
}
STEP = {"tokens": 100, "supervised_tokens": 40, "lr": 2e-4, "grad_norm": 1.0, "step_s": 0.5}
STEP |= {"tokens_per_s": 200.0, "memory_bytes": 2**30}


def make_run(folder: Path, *, num_steps: int = 40, without: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    events = [
        evaluation(0, "before", 3.2143217, 0.0, "no"),
        {"time": 1.7e9, "kind": "warning", "message": f"careful {HOSTILE}"},
        evaluation(num_steps, "after", 0.0412345, 0.95, "yes"),
        {"time": 1.7e9, "kind": "<i>new</i>", "detail": HOSTILE},
    ]
    write_lines(
        folder / "metrics.jsonl", [{"step": n, "loss": 3 / n} | STEP for n in range(1, num_steps + 1)]
    )
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text("backend: auto\nlr: 0.0002\n")
    (folder / "plan.json").write_text(json.dumps(PLAN | {"num_steps": num_steps}))
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"steps": num_steps}))
    for name in without:
        (folder / name).unlink()
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def render_page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def damaged(value: Any, source: random.Random) -> Any:
    """The value with a few of its parts replaced by values of another type."""
    if source.random() < 0.06:
        return source.choice([None, True, -1, 1e308, 10**30, "x", [], [[1]], {}, {"a": {"b": 1}}])
    if isinstance(value, dict):
        return {key: damaged(each, source) for key, each in value.items()}
    return [damaged(each, source) for each in value] if isinstance(value, list) else value
