"""Damage the contents of files at random: bytes, JSON values, and the headers of binary formats."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(0, -1, 7, 2**31, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf"), None, True, False),
    *("many", "", "x" * 3000, "\ud800", "a\0b", "../../etc/passwd", "/dev/zero", "\x1b]52;c;aGk=\x07"),
    *("(.*)*(.*)*(.*)*x", [], {}, [[]], [None], ["q_proj"], {"a": {"b": []}}),
)  # fmt: skip


def put(path: Path, contents: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(contents)


def put_special(path: Path, chance: random.Random) -> None:
    """Put something that is not a regular file there."""
    path.unlink(missing_ok=True)
    kind = chance.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path.name)


def damage_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Change, cut, repeat or insert bytes anywhere."""
    data = bytearray(raw)
    kind = chance.randrange(8)
    place = chance.randrange(len(data) + 1)
    if kind == 0:
        return bytes(data[:place])
    if kind == 1:
        return bytes(data[:place]) + chance.randbytes(chance.randrange(1, 64)) + bytes(data[place:])
    if kind == 2:
        return bytes(data) + chance.choice([b"\0" * 600, b"x", b"}", b"[" * 5000, raw[:200]])
    if kind == 3:
        return chance.choice([b"", b" ", b"\0", b"null", b"[]", b"{}", b"3", b'"text"', b"\xff\xfe{\0}\0"])
    if kind == 4:
        return chance.choice([b"[" * 100_000, b'{"a":' * 3000, b"- " * 3000, b"1" * 6000])
    for _ in range(chance.choice([1, 1, 3, 20])):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def damage_json(value: Any, chance: random.Random) -> bytes:
    """Replace, remove, rename or repeat a value anywhere in a JSON document."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2])):
        _change_inside(value, chance)
    text = json.dumps(value, indent=1)
    if chance.random() < 0.05 and "\n" in text:  # a key that occurs twice
        lines = text.split("\n")
        place = chance.randrange(1, len(lines))
        lines.insert(place, lines[place].rstrip(",") + ",")
        text = "\n".join(lines)
    return text.encode()


def _change_inside(value: Any, chance: random.Random) -> None:
    holder = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = chance.choice(keys)
        inner = holder[key]
        if isinstance(inner, (dict, list)) and inner and chance.random() < 0.7:
            holder = inner
            continue
        break
    act = chance.random()
    if act < 0.7:
        holder[key] = copy.deepcopy(chance.choice(HOSTILE))
    elif act < 0.85:
        del holder[key]
    elif act < 0.92:
        holder[key] = _deep(chance.choice([30, 70, 400]))
    elif isinstance(holder, dict):
        holder[chance.choice(["", "x\0", "../x", key + key])] = holder.pop(key)
    else:
        holder.extend([inner] * chance.choice([1, 100]))


def _deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def damage_safetensors(raw: bytes, chance: random.Random) -> bytes:
    """Damage the header as JSON with a length that fits, or the bytes of the file."""
    if chance.random() < 0.35:
        return damage_bytes(raw, chance)
    (length,) = struct.unpack("<Q", raw[:8])
    if chance.random() < 0.15:
        wrong = chance.choice([0, 1, length - 1, length + 8, 2**32, 2**63, 2**64 - 1])
        return struct.pack("<Q", wrong) + raw[8:]
    header = damage_json(json.loads(raw[8 : 8 + length]), chance)
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def damage_npy(raw: bytes, chance: random.Random) -> bytes:
    """Replace the shape, the dtype or the order in the header, or damage the bytes."""
    if chance.random() < 0.4:
        return damage_bytes(raw, chance)
    (length,) = struct.unpack("<H", raw[8:10])
    shapes = ["(0,)", "(-1, 3)", "(2**62, 4)", "(9999999999, 16)", "()", "(3,)", "(1, 1, 1)", "'x'", "[[]]"]
    dtypes = [
        "'|O'",
        "'<f8'",
        "'<i8'",
        "'<U7'",
        "'|b1'",
        "'<c8'",
        "'x'",
        "[('a', '<f4')]",
        "'|V4'",
        "'<M8[s]'",
    ]
    header = f"{{'descr': {chance.choice(dtypes)}, 'fortran_order': {chance.choice(['True', '7', 'None'])}, "
    header += f"'shape': {chance.choice(shapes)}}}"
    if chance.random() < 0.6:  # one field only
        old = raw[10 : 10 + length].decode()
        field, values = chance.choice([("descr", dtypes), ("shape", shapes)])
        found = ast.literal_eval(old)
        shown = {name: repr(value) for name, value in found.items()} | {field: chance.choice(values)}
        header = "{" + ", ".join(f"'{name}': {value}" for name, value in shown.items()) + "}"
    encoded = header.encode() + b"\n"
    return raw[:8] + struct.pack("<H", len(encoded)) + encoded + raw[10 + length :]


def damage_gguf(raw: bytes, chance: random.Random) -> bytes:
    """Overwrite counts, lengths and values in the header, where all of its structure is."""
    if chance.random() < 0.2:
        return damage_bytes(raw, chance)
    data = bytearray(raw)
    end = min(len(data), raw.find(b"tokenizer.ggml.tokens") if chance.random() < 0.6 else len(data))
    for _ in range(chance.choice([1, 1, 2])):
        place = chance.randrange(4, max(5, end - 8))
        form, most = chance.choice([("<Q", 2**64), ("<I", 2**32), ("<B", 2**8)])
        value = chance.choice([0, 1, 2, 255, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1]) % most
        data[place : place + struct.calcsize(form)] = struct.pack(form, value)
    return bytes(data)


def damage_tar(raw: bytes, chance: random.Random) -> bytes:
    """Overwrite fields of a member's header with a valid checksum, or any bytes."""
    if chance.random() < 0.3:
        return damage_bytes(raw, chance)
    data = bytearray(raw)
    headers = [
        place for place in range(0, len(data) - 512, 512) if data[place + 257 : place + 262] == b"ustar"
    ]
    if not headers:
        return damage_bytes(raw, chance)
    start = chance.choice(headers)
    names = [b"../x", b"/x", b"a\0b", b"x" * 100, b"move.json", b".", b"plan.json/x"]
    sizes = [b"77777777777\0", b"00000000000\0", b"\x80" + b"\xff" * 11, b"zzz"]
    kinds = [bytes([letter]) for letter in b"12356SxgLK?"]
    prefixes = [b"..", b"deep/" * 30, b"\xff" * 20]
    field, values = chance.choice(
        [
            (slice(0, 100), names),
            (slice(124, 136), sizes),
            (slice(156, 157), kinds),
            (slice(345, 500), prefixes),
        ]
    )
    value = chance.choice(values)
    width = field.stop - field.start
    data[start + field.start : start + field.stop] = value[:width].ljust(width, b"\0")
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)


def damage_tokenizer(tokenizer: dict[str, Any], chance: random.Random) -> bytes:
    """Write a tokenizer whose parts grow the text, take exponential time, or number tokens wrongly."""
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    patterns = [
        "(a*)*\\d",
        "(?:a|a)*\\d",
        ".*.*.*\\d{9}",
        "(\\w+\\s?)*\\d$",
        "[",
        "(?<=a",
        "a{1,99999}{1,99999}",
    ]
    part = chance.choice(["normalizer", "normalizer regex", "pre", "decoder", "added", "vocab"])
    if part == "normalizer":
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * chance.choice([3, 24, 300])}
    elif part == "normalizer regex":
        regex = {"type": "Replace", "pattern": {"Regex": chance.choice(patterns)}, "content": "b" * 50}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [regex] * chance.choice([1, 3])}
    elif part == "pre":
        tokenizer["pre_tokenizer"] = split | {"pattern": {"Regex": chance.choice(patterns)}}
    elif part == "decoder":
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [double] * 24}
    elif part == "added":
        tokenizer["added_tokens"] = [
            dict(token, id=chance.choice([-1, 2**31, 10**9])) for token in tokenizer["added_tokens"]
        ]
    else:
        tokenizer["model"]["vocab"] = {
            token: chance.choice([0, number, 2**31]) for token, number in tokenizer["model"]["vocab"].items()
        }
    return json.dumps(tokenizer).encode()


def damage_yaml(chance: random.Random) -> str:
    """Return a configuration with one to three hostile values."""
    lines = chance.sample(YAML_VALUES, chance.choice([1, 1, 3]))
    names = [
        "lr",
        "batch_size",
        "model_name",
        "dataset",
        "name",
        "max_steps",
        "seed",
        "precision",
        "lora_target_modules",
    ]
    text = "".join(f"{chance.choice(names)}: {value}\n" for value in lines)
    return chance.choice(["", "backend: cpu\n", "---\n", "%YAML 1.1\n---\n"]) + text


_BOMB = "{a: &a [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]" for n in range(9)
)
YAML_VALUES = (
    *("2024-13-45", "1" + "0" * 400, "7" * 5000, "0b_", "!!int abc", "!!bool x", "!!timestamp abc", "!!binary x"),
    *("!!python/object:os.system x", "!!set {a, b}", "[" * 300, '"\\0"', '"\\UFFFFFFFF"', '"\\ud800"', '"\\x1b[31m"'),
    *(".nan", ".inf", "1:20:30", "0x" + "f" * 40, "1_000", "*missing", "&a [*a]", _BOMB + "}", "{<<: {lr: 1}}"),
    *("[1, 2]", "{a: 1}", "? [1]", "null", "''", "true", "'" + "x" * 5000 + "'", "\t- x", "@x", "|\n  text\n"),
)  # fmt: skip
