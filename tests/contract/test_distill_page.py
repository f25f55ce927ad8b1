"""Run the commands of docs/guide/distill.md as written."""

from __future__ import annotations

import json
import shutil

import pytest
from pages import Followed, Page, Workshop

from crosstune.models.bundled import install_bundled

pytestmark = pytest.mark.slow  # the bundled model
PAGE = Page("distill.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    rows = [
        {"prompt": f"Is {number} even?", "completion": "Yes." if number % 2 == 0 else "No, it is odd."}
        for number in range(24)
    ]
    # The student's weights under another identity: a larger model with its tokenizer is not bundled.
    teacher = shutil.copytree(install_bundled("smollm2-135m"), shop.home / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    for name in ("SHA256SUMS", "crosstune.json"):
        (teacher / name).unlink(missing_ok=True)
    (shop.home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Followed(shop, PAGE)


def test_every_command_trains(followed: Followed) -> None:
    for number, name in enumerate(("small", "stored", "own")):
        assert "finished 4 steps" in followed[number]
        lines = (followed.workshop.home / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4 and all(row["kl"] > 0 for row in rows)
        assert ("on_policy" in rows[0]) == (name == "own")
    assert (followed.workshop.home / "runs" / "stored" / "reference.safetensors").is_file()
