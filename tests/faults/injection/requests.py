"""Make requests with bad values for `crosstune plan`, from a seed, and judge the answers.

A request sets options by flag, in a YAML file and in the environment. An answer is right if its exit code is 0 or 2, if
a refusal names something of the request, and if its text is short and printable.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from crosstune.cli.main import main
from crosstune.config.option import Option
from crosstune.config.peer_names import SAME_FOR_VALUES, peer_names
from crosstune.config.schema import option_list, options_by_name
from crosstune.core.safe_text import printable

LONGEST_ANSWER = 20_000
MACHINES = ("rtx-4090", "apple-m1-16gb", "cpu-laptop", "h200")
VARIABLES = (
    *("FSDP_BACKEND", "CROSSTUNE_CACHE", "CROSSTUNE_LAUNCHER", "RANK", "WORLD_SIZE", "MLX_RANK", "MLX_HOSTFILE"),
    *("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO", "PYTORCH_ENABLE_MPS_FALLBACK"),
    "MLX_MAX_MB_PER_BUFFER",
)  # fmt: skip
TEXTS = (
    *("", " ", "0", "-1", "1", "true", "yes", "null", "nan", "-inf", "1e400", "1e3", "0x10", "0b_", "1_000", "1.5"),
    *("+3", "--3", "٣", "½", "1e", "9" * 400, "9" * 5000, "0." + "9" * 5000, "18446744073709551616", "2024-13-45"),
    *("1:2", "a\0b", "\udcff\udc80", "\x1b]52;c;aGk=\x07", "a\nb", "..", "/", "../x", "-x", "~nobody-here/x", "~"),
    *("/dev/null", "/proc/self/mem", "x" * 300, "x/" * 3000, "a" * 100_000, "\u202eabc", "💥" * 80, "%s%n{0}{x}"),
    *("$(id)", "(.*)*x", "[", "(?P<", "a,b,,c", ",", "none", "auto", "latest", "CON"),
    *("https://u:pw@h/x", "hf_" + "A1b2" * 9, "sk-" + "a1B2" * 10, "0s", "9999999d", "1h1h", "-3h", "NaNs"),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**64, -(2**70), 10**400, 10**5000, 0.5, 1e308, float("inf"), float("nan")),
    *([], {}, ["a", "b"], [[["x"]]], {"a": {"b": {"c": []}}}, b"bytes", {1, 2}),
)  # fmt: skip
SNIPPETS = (
    *("lr: 2024-13-45", "lr: 0b_", "seed: !!int abc", "lr: !!timestamp abc", "lr: " + "[" * 3000, "lr: &a [*a]"),
    *("name: !!python/object/apply:os.system [id]", "batch_size: 1" + "0" * 400, "batch_size: " + "9" * 5000),
    "a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nlr: [*c,*c,*c,*c]",
    *("? [a, b]\n: 1", "? {a: b}\n: 1", "<<: {lr: 1}", "lr: 1\nlr: 2", "- lr\n- 1", "just text", "\t\tlr: 1"),
    *('name: "a\\0b"', 'name: "\\ud800"', "model:\n  lr: 1\n  lr: 2\nlr: 3", "%YAML 9.9\n---\nlr: 1"),
    *("lr: 1\n---\nlr: 2", "1: 2\n3.5: 4\ntrue: x\nnull: y"),
)  # fmt: skip


@dataclass
class Request:
    seed: int
    words: list[str] = field(default_factory=list)
    file: bytes | None = None
    environment: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Words that a refusal may name: keys, options, variables, and values, as a file that is missing."""


def make_request(seed: int) -> Request:
    """Return the request of a seed: a few options with values that are mostly bad, in up to three places."""
    draw = random.Random(seed)
    request = Request(seed=seed, names={"argument"})
    here = draw.random() < 0.15
    request.words = ["plan", "--backend", "cpu"] if here else ["plan", "--machine", draw.choice(MACHINES)]
    # A model that is here would be opened, which takes seconds.
    request.words += ["--model_name", "nobody/no-model"]
    request.names |= {"model_name", "backend"}
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        key, option = _key(draw)
        flag = key.replace("_", "-") if draw.random() < 0.2 else key
        request.names.add(flag)
        _note(request, key, option)
        text = _text(draw, option)
        request.words += [f"--{flag}={text}"] if draw.random() < 0.5 else [f"--{flag}", text]
        request.names.add(text[:30] if text.strip() else "value")
    if draw.random() < 0.4:
        request.file = _file(draw, request)
    if draw.random() < 0.25:
        name = draw.choice(VARIABLES)
        request.environment[name] = _variable(draw)
        request.names.add(name)
        if name in ("RANK", "MLX_RANK") and draw.random() < 0.7:
            other = "WORLD_SIZE" if name == "RANK" else "MLX_HOSTFILE"
            request.environment[other] = _variable(draw)
            request.names.add(other)
    return request


def _key(draw: random.Random) -> tuple[str, Option | None]:
    """Return the name of an option, mostly, and the option."""
    option = draw.choice(option_list())
    kind = draw.random()
    if kind < 0.75:
        return draw.choice((option.name, option.name, *option.aliases)), option
    if kind < 0.9:
        name = draw.choice([*peer_names().same, *SAME_FOR_VALUES, *peer_names().different])
        other = peer_names().same.get(name) or SAME_FOR_VALUES.get(name, ("",))[0]
        return name, options_by_name().get(other)
    letters = list(option.name)
    letters[draw.randrange(len(letters))] = draw.choice(string.ascii_letters + "_-.\x00é")
    return "".join(letters), None


def _note(request: Request, key: str, option: Option | None) -> None:
    request.names |= {key, key.replace("-", "_"), *([option.name] if option is not None else [])}


def _text(draw: random.Random, option: Option | None) -> str:
    kind = draw.random()
    if option is not None and kind < 0.3:
        return _good(draw, option)
    if kind < 0.85:
        return draw.choice(TEXTS)
    if kind < 0.93:
        return str(draw.choice((-1, 1)) * draw.randrange(10 ** draw.randrange(1, 40)))
    length = draw.randrange(40)
    return "".join(
        chr(draw.choice((draw.randrange(1, 128), draw.randrange(0x10FFFF)))) for _ in range(length)
    )


def _variable(draw: random.Random) -> str:
    """Return a value that the system takes for a variable: any bytes but NUL."""
    return os.fsdecode(_text(draw, None).replace("\0", "").encode(errors="surrogatepass"))


def _good(draw: random.Random, option: Option) -> str:
    if option.type is bool:
        return draw.choice(("true", "false"))
    if option.choices:
        return draw.choice(option.choices)
    low, high = option.low or 0, option.high or 10
    return str(draw.choice((low, high, option.default, (low + high) // 2)))


def _file(draw: random.Random, request: Request) -> bytes:
    kind = draw.random()
    if kind < 0.25:
        return draw.choice(SNIPPETS).encode()
    if kind < 0.3:
        return draw.randbytes(draw.randrange(200))
    data: dict[Any, Any] = {}
    for _ in range(draw.randrange(1, 4)):
        key, option = _key(draw)
        _note(request, key, option)
        value: Any = draw.choice(VALUES) if draw.random() < 0.5 else _text(draw, option)
        if draw.random() < 0.2:
            section = draw.choice([*peer_names().sections, "nowhere"])
            request.names.add(section)
            data[section] = {key: value}
        else:
            data[key] = value
    with contextlib.suppress(ValueError):  # an integer of 5,000 digits cannot be written
        return yaml.safe_dump(data, allow_unicode=True).encode(errors="surrogatepass")
    return b"batch_size: " + b"9" * 5000


@dataclass(frozen=True)
class Answer:
    code: int
    said: str
    error: str
    """The exception that came through, if one did."""


def answer(request: Request, folder: Path) -> Answer:
    """Return the answer of `plan`, run in this process."""
    words = list(request.words)
    if request.file is not None:
        path = folder / "request.yaml"
        path.write_bytes(request.file)
        words += ["--config", str(path)]
    out, err = io.StringIO(), io.StringIO()
    code, error = 1, ""
    with _environment(request.environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as raised:  # noqa: BLE001 - whatever comes through is the finding
            error = f"{type(raised).__name__}: {raised}"[:300]
    return Answer(code=code, said=err.getvalue() + (out.getvalue() if code == 0 else ""), error=error)


@contextlib.contextmanager
def _environment(added: dict[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, added):
        for name in set(VARIABLES) - set(added):
            os.environ.pop(name, None)
        yield


def problems(request: Request, answer: Answer) -> list[str]:
    """Return what is wrong with an answer."""
    if answer.error:
        return [answer.error]
    found: list[str] = []
    if answer.code not in (0, 2):
        found.append(f"exit code {answer.code}")
    if len(answer.said) > LONGEST_ANSWER:
        found.append(f"{len(answer.said):,} characters of answer")
    if "Traceback" in answer.said:
        found.append("a traceback")
    if printable(answer.said) != answer.said:
        found.append("control characters")
    names = {*request.names, *(repr(name)[1:-1] for name in request.names), "request.yaml"}
    if answer.code == 2 and not any(name in answer.said for name in names if len(name) > 1):
        found.append(f"it names nothing of the request: {answer.said[:300]}")
    return found
