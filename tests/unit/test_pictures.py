"""Rows with pictures: where they are found, and which files are refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vision_models import draw

from crosstune.core.errors import UserError
from crosstune.data.read.formats import to_conversation
from crosstune.data.read.pictures import IN_TEXT, PICTURES, open_picture, thumbnail


def turn(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


ANSWER = {"role": "assistant", "content": "It is red."}
TEXT = {"type": "text", "text": "What is it?"}


def read(row: dict[str, Any], form: str = "messages") -> list[dict[str, Any]]:
    found = to_conversation(row, form, no_pictures="")
    assert not isinstance(found, str)
    return found


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    picture.save(held, format=kind, **options)
    return held.getvalue()


@pytest.mark.parametrize(
    ("row", "form", "content", "references"),
    [
        ({"messages": [turn({"type": "image", "path": "a.png"}, TEXT), ANSWER]}, "messages", f"{IN_TEXT}What is it?", [{"path": "a.png"}]),
        ({"prompt": "A <image> and <image>?", "completion": "b", "images": ["a.png", "b.png"]}, "prompt_completion", f"A {IN_TEXT} and {IN_TEXT}?", ["a.png", "b.png"]),
        ({"question": "<image>?", "answer": "b", "image": {"bytes": b"x", "path": None}}, "question_answer", f"{IN_TEXT}?", [{"bytes": b"x", "path": None}]),
        ({"messages": [turn({"type": "image"}, TEXT), ANSWER], "images": ["a.png"]}, "messages", f"{IN_TEXT}What is it?", ["a.png"]),
        ({"messages": [turn({"type": "image_url", "image_url": {"url": "a.png"}}), ANSWER]}, "messages", IN_TEXT, [{"image_url": {"url": "a.png"}}]),
    ],
)  # fmt: skip
def test_pictures_are_found_in_parts_and_columns(
    row: dict[str, Any], form: str, content: str, references: list[Any]
) -> None:
    first = read(row, form)[0]
    assert (first["content"], first[PICTURES]) == (content, references)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image>?", "completion": "b"}, "0 pictures, but <image> occurs 1 time in"),
        ({"prompt": "a", "completion": "b", "images": ["a.png"]}, "1 picture, but <image> occurs 0 times in"),
        ({"prompt": "<image>", "completion": "b", "video": "a.mp4"}, "not text: video"),
        ({"prompt": "a", "completion": "<image>", "image": "a.png"}, "message of the assistant has a picture"),
        ({"prompt": [turn({"type": "image", "path": "a.png"})], "completion": "b", "image": "a.png"}, "in its messages and in a column"),
        ({"prompt": [turn({"type": "audio", "path": "a.wav"})], "completion": "b"}, "must be text or an image"),
        ({"prompt": [turn({"type": "text", "text": IN_TEXT})], "completion": "b"}, "must be text"),
    ],
)  # fmt: skip
def test_rows_with_wrong_pictures_are_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(row, "prompt_completion")


def test_files_that_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    draw(tmp_path, "outside.png", "red")
    (inside / "link.png").symlink_to(tmp_path / "outside.png")
    (inside / "text.png").write_text("no picture")
    good = saved(Image.new("RGB", (30, 20)))
    (inside / "cut.png").write_bytes(good[:-30])
    (inside / "bomb.ppm").write_bytes(b"P6 9000 9000 255\n")
    for name, words in {
        "missing.png": "cannot be read",
        "../outside.png": "outside the folder",
        str(tmp_path / "outside.png"): "outside the folder",
        "link.png": "outside the folder",
        "text.png": "cannot be decoded",
        "cut.png": "cannot be decoded",
        "bomb.ppm": "9000 x 9000 pixels",
        "https://example.org/a.png": "not downloaded",
        "": "without a path",
        "a\0b.png": "cannot be",
    }.items():
        with pytest.raises(UserError, match=words):
            open_picture(name, inside)
    with pytest.raises(UserError, match="no folder"):
        open_picture("a.png", None)
    with pytest.raises(UserError, match="not base64"):
        open_picture({"base64": "%%%"}, inside)


def test_contents_in_the_row_and_animations_and_turned_pictures(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    raw = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    for reference in ({"bytes": raw}, {"base64": base64.b64encode(raw).decode()}, {"base64": f"data:image/gif;base64,{base64.b64encode(raw).decode()}"}):  # fmt: skip
        found = open_picture(reference, None)
        assert (found.width, found.height, found.animated) == (8, 6, True)
        assert found.load().getpixel((0, 0)) == (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "turned.jpg").write_bytes(saved(Image.new("RGB", (8, 6)), "JPEG", exif=exif.tobytes()))
    turned = open_picture("turned.jpg", tmp_path)
    assert (turned.width, turned.height) == (6, 8) == turned.load().size
    assert open_picture("turned.jpg", tmp_path, decode=False) == turned
    assert thumbnail(turned).startswith("data:image/jpeg;base64,")
    (tmp_path / "turned.jpg").write_bytes(saved(Image.new("RGB", (8, 6)), "JPEG"))
    with pytest.raises(UserError, match="has changed"):
        turned.load()
