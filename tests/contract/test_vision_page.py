"""Run the commands of docs/guide/vision.md as written."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from pages import ROOT, Followed, Page, Workshop

pytestmark = pytest.mark.slow  # five commands
PAGE = Page("vision.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    if not (shop.home / "examples").exists():
        (shop.home / "examples").symlink_to(ROOT / "examples")
        python = shop.home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    return Followed(shop, PAGE)


def test_data_and_plan_count_the_pictures(followed: Followed) -> None:
    assert "2,000" in followed[1] and "pictures" in followed[1]
    assert "memory" in followed[2]
    plan = PAGE.commands()[2].removeprefix("crosstune ")
    more, less = (
        _memory(followed.workshop.run(f"{plan.replace('256', pixels)} --json")) for pixels in ("1024", "256")
    )
    assert less["activations"] < more["activations"] and less["weights"] == more["weights"]


def _memory(printed: str) -> dict[str, int]:
    parts: dict[str, int] = json.loads(printed[printed.index("{") :])["memory_parts"]
    return parts


def test_the_run_and_the_merged_model(followed: Followed) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    assert "merged" in followed[4]
    run = followed.workshop.home / "runs" / "shapes"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    samples = [event["samples"] for event in events if event["kind"] == "evaluation"]
    assert all(sample["pictures"][0].startswith("data:image/jpeg;base64,") for sample in samples[0])
    for folder in (run / "adapter", run / "merged"):
        assert AutoImageProcessor.from_pretrained(folder, backend="pil").patch_size == 4
    assert AutoModelForImageTextToText.from_pretrained(run / "merged").config.model_type == "qwen2_5_vl"
