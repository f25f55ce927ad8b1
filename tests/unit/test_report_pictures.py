"""Pictures of samples in a report: beside their question, offline, and only thumbnails."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from PIL import Image
from report_runs import HOSTILE, evaluation, make_run, render_page, write_lines
from vision_models import draw

from crosstune.data.read.pictures import open_picture, thumbnail

UNSAFE = (
    "https://evil.example/x.png", "//evil.example/x.png", "javascript:alert(1)", "data:image/svg+xml;base64,PHN2Zz4=",
    'data:image/jpeg;base64,AA" onerror="alert(1)', "data:text/html;base64,AAAA", "file:///etc/passwd", "", 7, None, ["x"],
    f"data:image/jpeg;base64,{'A' * (1 << 17)}",
)  # fmt: skip


def with_pictures(folder: Path, *samples: dict[str, Any]) -> Path:
    """Write a run whose evaluations answered the same questions."""
    run = make_run(folder)
    events = [evaluation(0, "before", 3.0, 0.0, "no"), evaluation(40, "after", 0.1, 1.0, "yes")]
    for event, answer in zip(events, ("no", "yes"), strict=True):
        event["samples"] = [{"answer": answer, "reference": "yes", **sample} for sample in samples]
    write_lines(run / "events.jsonl", events)
    return run


def thumbnails(folder: Path, *colours: str) -> list[str]:
    return [thumbnail(open_picture(draw(folder, f"{one}.png", one), folder)) for one in colours]


def test_thumbnails_are_beside_their_question(tmp_path: Path) -> None:
    """Equal questions about different pictures are different rows."""
    red, blue = thumbnails(tmp_path, "red", "blue")
    samples = [{"prompt": HOSTILE, "pictures": [red, blue]}, {"prompt": HOSTILE, "pictures": [blue]}]
    page = render_page(with_pictures(tmp_path / "run", *samples))
    shown = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert shown[-3:] == [red, blue, blue] and set(shown) == {red, blue}
    assert page.text.count(HOSTILE) >= 2
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and "img-src data:;" in policy


def test_nothing_but_thumbnails_becomes_an_image(tmp_path: Path) -> None:
    page = render_page(
        with_pictures(
            tmp_path / "run", {"prompt": "?", "pictures": list(UNSAFE)}, {"prompt": "!", "pictures": "x"}
        )
    )
    assert page.count("img") == 0


def test_a_thumbnail_of_a_large_picture_is_small(tmp_path: Path) -> None:
    noise = Image.effect_noise((3000, 2000), 90).convert("RGB")
    noise.save(tmp_path / "large.png")
    uri = thumbnail(open_picture("large.png", tmp_path))
    assert len(uri) < 1 << 16
    raw = base64.b64decode(uri.partition(",")[2])
    (tmp_path / "small.jpg").write_bytes(raw)
    small = open_picture("small.jpg", tmp_path)
    assert max(small.width, small.height) == 128
