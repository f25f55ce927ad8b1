"""Damaged and unusual pictures, and rows that name them wrongly, each with a command that reads them."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from vision_models import FAMILIES, tiny_vision

from injection.hostile_runs import Made
from injection.intact_files import FIXED, Workshop
from injection.mutations import HOSTILE, damage_bytes, put, put_special

Row = dict[str, Any]
KINDS = ("png", "jpeg", "gif", "webp", "bmp", "tiff", "ppm")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "HSV")
ROWS = 4


def pictures_case(shop: Workshop, work: Path, chance: random.Random) -> Made:
    """Damage one of a few pictures, or a row around it."""
    family = chance.choice(FAMILIES)
    model = shop.made(f"vision-{family}", lambda folder: tiny_vision(folder, family, layers=2))
    data = work / "data"
    data.mkdir()
    (work / "outside.png").write_bytes(saved(_drawn(chance)))
    rows = [_row(data, number, chance) for number in range(ROWS)]
    what = chance.choice([*PICTURES, *REFERENCES])
    if what in PICTURES:
        PICTURES[what](data / "0.png", chance)
    else:
        rows[0] = REFERENCES[what](rows[0], data, chance)
    path = data / "rows.jsonl"
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode(errors="surrogatepass"))
    place = ["--model_name", str(model), "--dataset", str(path)]
    amount = [
        "--max_steps",
        "1",
        "--lora_rank",
        "2",
        "--lr",
        "1e-4",
        "--batch_size",
        "2",
        "--eval_fraction",
        "0.5",
    ]
    train = ["train", *FIXED, *place, *amount, "--output_dir", str(work / "runs"), "--name", "r"]
    train += ["--max_new_tokens", "1", *["--skip_bad_rows"] * (chance.random() < 0.3)]
    train += ["--context_length", "512", "--packing"] * (chance.random() < 0.3)
    command = chance.choice([["data", *place], ["plan", "--backend", "cpu", *place], train])
    return f"pictures {what} {command[0]}", command, (str(path), "picture", "image", "context")


def saved(picture: Image.Image, kind: str = "png", **options: Any) -> bytes:
    held = io.BytesIO()
    picture.save(held, format=kind, **options)
    return held.getvalue()


def _drawn(chance: random.Random, *, size: tuple[int, int] | None = None) -> Image.Image:
    width, height = size or (chance.randrange(8, 60), chance.randrange(8, 60))
    return Image.frombytes("RGB", (width, height), chance.randbytes(3 * width * height))


def _row(data: Path, number: int, chance: random.Random) -> Row:
    """Return a row in one of the layouts that are read."""
    name = f"{number}.png"
    (data / name).write_bytes(saved(_drawn(chance)))
    if chance.random() < 0.5:
        return {"prompt": "<image>What colour is this?", "completion": "red", "images": [name]}
    parts = [{"type": "image", "path": name}, {"type": "text", "text": "What colour is this?"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]}


def _damaged(path: Path, chance: random.Random) -> None:
    kind = chance.choice(KINDS)
    put(path, damage_bytes(saved(_drawn(chance), kind), chance))


def _header_lies(path: Path, chance: random.Random) -> None:
    """Claim another size than the pixels have, with a right checksum."""
    raw = bytearray(saved(_drawn(chance)))
    size = chance.choice([(0, 5), (1, 1), (2**31 - 1, 2**31 - 1), (70_000, 70_000), (9000, 9000), (300, 7)])
    raw[16:24] = struct.pack(">II", *size)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    put(path, bytes(raw))


def _bomb(path: Path, chance: random.Random) -> None:
    """Write many pixels, or much text, in few bytes."""
    if chance.random() < 0.5:
        put(path, saved(Image.new("1", (chance.choice([7000, 9000]), 8000))))
        return
    raw = saved(_drawn(chance))
    text = b"k\0\0" + zlib.compress(bytes(100 << 20))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    put(path, raw[:33] + chunk + raw[33:])


def _animated(path: Path, chance: random.Random) -> None:
    frames = [_drawn(chance, size=(20, 30)) for _ in range(chance.choice([2, 60]))]
    raw = saved(
        frames[0], chance.choice(["gif", "png", "webp", "tiff"]), save_all=True, append_images=frames[1:]
    )
    put(path, damage_bytes(raw, chance) if chance.random() < 0.5 else raw)


def _mode(path: Path, chance: random.Random) -> None:
    """Write a picture in another mode, in a format that has it."""
    picture = _drawn(chance)
    mode = chance.choice(MODES)
    if mode in ("I;16", "PA"):
        picture = picture.convert({"I;16": "I", "PA": "LA"}[mode])
    picture = picture.convert(mode)
    for kind in chance.sample(KINDS, len(KINDS)):
        try:
            raw = saved(picture, kind)
        except (OSError, ValueError):  # this format has no such mode
            continue
        put(path, raw)
        return


def _palette(path: Path, chance: random.Random) -> None:
    clear: Any = chance.choice([0, 255, bytes(range(256)), b"", b"\0"])
    put(path, saved(_drawn(chance).quantize(chance.choice([2, 256])), transparency=clear))


def _turned(path: Path, chance: random.Random) -> None:
    exif = Image.Exif()
    exif[0x0112] = chance.choice([*range(10), 65535])
    raw: bytes = exif.tobytes()
    if chance.random() < 0.5:
        raw = damage_bytes(raw, chance)[:60_000]
    put(path, saved(_drawn(chance), chance.choice(["jpeg", "png", "webp"]), exif=raw))


def _narrow(path: Path, chance: random.Random) -> None:
    put(path, saved(_drawn(chance, size=chance.choice([(1, 1), (1, 900), (900, 1), (3, 2), (2500, 2)]))))


def _other_file(path: Path, chance: random.Random) -> None:
    put(path, chance.choice([b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\nquit\n", b"II*\0" + b"\xff" * 60]))  # fmt: skip


def _link(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(
        chance.choice(["../outside.png", "1.png", "/etc/passwd", "missing.png", "0.png", "/proc/self/mem"])
    )


def _unreadable(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.5:
        path.unlink()
    else:
        with path.open("r+b") as file:
            os.truncate(file.fileno(), chance.choice([0, 65 << 20, 1 << 40]))


PICTURES: dict[str, Callable[[Path, random.Random], None]] = {
    "damaged": _damaged,
    "header": _header_lies,
    "bomb": _bomb,
    "animated": _animated,
    "mode": _mode,
    "palette": _palette,
    "turned": _turned,
    "narrow": _narrow,
    "other file": _other_file,
    "special": put_special,
    "link": _link,
    "unreadable": _unreadable,
}


def _refer(row: Row, reference: Any) -> Row:
    """Return the row with another reference of its picture."""
    if "images" in row:
        return {**row, "images": [reference]}
    part = {"type": "image", "path": reference}
    if isinstance(reference, dict):
        part = {"type": "image", **reference}
    question = row["messages"][0]["content"][1]
    return {"messages": [{"role": "user", "content": [part, question]}, row["messages"][1]]}


def _path(row: Row, data: Path, chance: random.Random) -> Row:
    names = (
        "../outside.png",
        str(data.parent / "outside.png"),
        "/etc/passwd",
        "~/x.png",
        "missing.png",
        ".",
        "..",
        "",
    )
    urls = (
        "https://example.org/a.png",
        "HTTP://example.org/a.png",
        "ftp://x/a.png",
        "s3://x/a.png",
        "file:///etc/passwd",
    )
    odd = (
        "a\0b",
        "\ud800.png",
        "x" * 300,
        "0.png\n",
        "file://0.png",
        "\\\\server\\a.png",
        "data/0.png",
        f"{data}/0.png",
    )
    return _refer(row, chance.choice([*names, *urls, *odd]))


def _contents(row: Row, data: Path, chance: random.Random) -> Row:
    """Put the contents of the picture in the row, damaged or not."""
    raw = (data / "0.png").read_bytes()
    raw = damage_bytes(raw, chance) if chance.random() < 0.5 else raw
    text = base64.b64encode(raw).decode()
    if chance.random() < 0.4:
        text = damage_bytes(text.encode(), chance).decode(errors="replace")
    uri = f"data:{chance.choice(['image/png', 'text/plain', '', ';;;'])};base64,{text}"
    return _refer(
        row,
        chance.choice([{"base64": text}, {"base64": uri}, {"image_url": {"url": uri}}, uri, {"bytes": text}]),
    )


def _hostile(row: Row, data: Path, chance: random.Random) -> Row:
    value: Any = chance.choice(
        [*HOSTILE, [1], [[]], {"url": {"url": {"url": "a"}}}, {"path": None}, {"bytes": [1, 2]}]
    )
    if "images" not in row or chance.random() < 0.5:
        return _refer(row, value)
    return {**row, "images": value}


def _numbers(row: Row, data: Path, chance: random.Random) -> Row:
    """Name more or fewer pictures than the text has places for."""
    if "images" in row:
        names, text = ["0.png"] * chance.choice([0, 1, 2, 60]), "<image>" * chance.choice([0, 1, 2, 60])
        column = chance.choice(["images", "image"])
        return {"prompt": f"{text}What?", "completion": "red", column: names} | (
            {"images": names} if chance.random() < 0.2 else {}
        )
    content = row["messages"][0]["content"]
    content = content * chance.choice([0, 2, 30]) + [{"type": "image"}] * chance.choice([0, 1]) + content[1:]
    question = {"role": "user", "content": chance.choice([content, "<image>", [], content[:1]])}
    return {"messages": [question, row["messages"][1]]}


def _roles(row: Row, data: Path, chance: random.Random) -> Row:
    """Put the picture where the model does not read one, or a part that is none."""
    picture = {"type": "image", "path": "0.png"}
    parts = [
        picture,
        {"type": "video", "path": "0.png"},
        {"type": "audio"},
        {"type": 3},
        {"text": "x"},
        "x",
        None,
        5,
        ["x"],
    ]
    content = [chance.choice(parts), {"type": "text", "text": chance.choice(["red", "", None, 5, "<image>", "<|image_pad|>", "<start_of_image>", "\ufdd1"])}]  # fmt: skip
    roles = chance.choice(
        [("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant", "tool", "assistant")]
    )
    place = chance.randrange(len(roles))
    return {
        "messages": [
            {"role": role, "content": content if number == place else "red"}
            for number, role in enumerate(roles)
        ]
    }


REFERENCES: dict[str, Callable[[Row, Path, random.Random], Row]] = {
    "path": _path,
    "contents": _contents,
    "hostile": _hostile,
    "numbers": _numbers,
    "roles": _roles,
}
PICTURE_KINDS: dict[str, Callable[[Workshop, Path, random.Random], Made]] = {"pictures": pictures_case}
