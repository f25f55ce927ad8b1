"""Rewards that check an answer: its text, its structure, and its code in a sandbox."""

from __future__ import annotations

import http.server
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opened_rewards import Open, Seen, scores

from crosstune.core.errors import UserError
from crosstune.recipes.rl.rewards.answer_checks import last_number


@pytest.mark.parametrize(
    ("reward", "value", "texts"),
    [
        ("exact:answer", "42", {"42": 1, " 42\n": 1, "420": 0, "It is 42": 0, "<answer> 42 </answer>": 1}),
        ("exact:answer", ["yes", "Yes"], {"Yes": 1, "yes": 1, "YES": 0, "no</think>yes": 1, "yes</think>no": 0}),
        ("exact:answer", 7, {"7": 1}),
        ("exact:answer", None, {"7": None}),
        ("number:answer", "18", {"9 + 9 = 18.": 1, "18, not 19": 0, "none": 0, "$18.00": 1, "-18": 0}),
        ("number:answer", "9 each\n#### 1,234", {"1234": 1, "#### 1234\n(12 rows)": 1, "1,234.0 kg": 1, "234": 0}),
        ("number:answer", 0.5, {"1/2 = .5": 1, "0.4999": 0}),
        ("number:answer", "unknown", {"5": None}),
        ("contains:answer", "blue", {"The sky is blue": 1, "red": 0}),
        ("contains:answer", ["red", "blue"], {"blue": 0.5, "red, blue": 1}),
        ("regex:^ab.*c$", None, {"ab\nc": 1, "xab c": 0}),
        ("json", None, {'{"a": 1}': 1, "Here:\n```json\n[1]\n```\n": 1, "{'a': 1}": 0, "NaN": 0, "": 0}),
        ("length:2-4", None, {"": 0, "a": 0.5, "a b": 1, "a b c d": 1, "a b c d e f": 0.5, "a " * 9: 0}),
        ("length:2-4chars", None, {"abc": 1, "a b": 1, "a": 0.5}),
        (
            "tags:think,answer",
            None,
            {
                "<think>a</think>\n<answer>b</answer>\n": 1,
                "<think>a</think> so <answer>b</answer>": 0,
                "<answer>b</answer><think>a</think>": 0,
                "<think>a<think></think><answer>b</answer>": 0,
                "<think>a</think><answer>b": 0,
            },
        ),
    ],
)  # fmt: skip
def test_a_check_of_answers(open_: Open, reward: str, value: Any, texts: Mapping[str, float | None]) -> None:
    assert scores(open_(reward), *texts, answer=value) == list(texts.values())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,2,3", "3"),
        ("3-5", "5"),
        ("x = −7", "-7"),
        ("1e3", "1E+3"),
        ("v1.2", None),
        ("-", None),
        ("a 5.", "5"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else str(found)) == number


def test_a_missing_column_is_a_counted_failure(open_: Open, seen: Seen) -> None:
    rewards = open_("exact:answer,number:other")
    assert scores(rewards, "a", answer="a") == [1.0]
    assert seen.warnings == ["the reward number has no score for 1 of 1 answers: the row has no column other"]


def test_a_pattern_without_end_costs_one_answer(open_: Open, seen: Seen) -> None:
    rewards = open_("regex:^(a+)+$", reward_timeout="1s")
    assert scores(rewards, "aaa", "a" * 60 + "b", "b") == [1.0, None, 0.0]
    assert "no score for 1 of 3 answers" in seen.warnings[0]


def test_a_schema_accepts_or_rejects(open_: Open, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    rewards = open_(f"json:{tmp_path}/schema.json")
    assert scores(rewards, '{"age": 3}', '{"age": "3"}', "[]", "{") == [1.0, 0.0, 0.0, 0.0]
    for written, words in (
        ('{"type": "thing"}', "is not a JSON schema"),
        ('{"$schema": []}', "its .schema is not text"),
        ("{", "schema.json"),
    ):
        (tmp_path / "schema.json").write_text(written)
        with pytest.raises(UserError, match=words):
            open_(f"json:{tmp_path}/schema.json")


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def test_code_passes_the_tests_of_its_row(open_: Open) -> None:
    rewards = open_("code:tests")
    right, wrong = fenced("def add(a, b):\n    return a + b"), fenced("def add(a, b):\n    return a - b")
    old = f"{right}\nBetter:\n{wrong}"
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    assert scores(rewards, right, wrong, "add = sum", old, fenced("def ("), tests=tests) == [
        1.0,
        0.5,
        0,
        0.5,
        0,
    ]
    assert scores(rewards, right, wrong, tests="\n".join(tests)) == [1.0, 0.0]
    assert scores(rewards, right, tests=None) == [None]


ATTACKS = {
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "raw socket": "import _socket\n_socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0)",
    "a program": "import subprocess\nsubprocess.run(['touch', 'FILE'])",
    "a program below Python": "import _posixsubprocess, os\nread, write = os.pipe()\n_posixsubprocess.fork_exec([b'/bin/touch', "
    "b'FILE'], [b'/bin/touch'], True, (write,), None, None, -1, -1, -1, -1, -1, -1, read, write, False, False, -1, "
    "None, None, None, -1, None, *([False] if __import__('sys').version_info[:2] < (3, 14) else []))\n"
    "__import__('time').sleep(0.3)",
    "a fork": "import os\nif os.fork() == 0:\n    open('FILE', 'w')",
    "a file outside": "open('FILE', 'w').write('x')",
    "a removal": "import os\nos.remove('KEPT')",
    "a move": "import shutil\nshutil.move('KEPT', 'here')",
    "native code": "import ctypes\nctypes.CDLL(None).unlink(b'KEPT')",
    "a signal": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "too much memory": "x = bytearray(3 << 30)",
    "no end": "while True: pass",
    "a long sleep": "import time\ntime.sleep(60)",
    "an early exit": "import os\nos._exit(0)",
    "exit": "raise SystemExit(0)",
    "output without end": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "a large file": "with open('own', 'wb') as file:\n    for _ in range(99): file.write(b'x' * 2**20)",
    "deep": "exec('(' * 100000)",
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls is Linux's")
def test_code_cannot_reach_out(open_: Open, tmp_path: Path) -> None:
    kept, file = tmp_path / "kept", tmp_path / "made"
    kept.write_text("kept")
    rewards = open_("code:tests", reward_timeout="2s", reward_memory=1)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        texts = [
            fenced(
                code.replace("PORT", str(server.server_port))
                .replace("FILE", str(file))
                .replace("KEPT", str(kept))
            )
            for code in ATTACKS.values()
        ]
        found = dict(zip(ATTACKS, scores(rewards, *texts, tests="pass"), strict=True))
    assert found == dict.fromkeys(ATTACKS, 0.0)
    assert kept.read_text() == "kept" and not file.exists()


def test_usual_code_runs_in_the_sandbox(open_: Open, seen: Seen) -> None:
    usual = {
        "files of its own": "import os\nos.mkdir('a')\nopen('a/b', 'w').write('x')\nassert open('a/b').read() == 'x'\n"
        "os.remove('a/b')",
        "an empty folder": "import os\nassert os.listdir() == []",
        "no secrets": "import os\nassert set(os.environ) <= {'HOME', 'TMPDIR', 'OMP_NUM_THREADS', 'LC_CTYPE'}",
        "numpy": "import numpy\nassert numpy.arange(4).sum() == 6",
        "threads": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "asyncio": "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
        "main": "if __name__ == '__main__':\n    raise SystemExit(1)",
        "prints": "print('a' * 10**6)",
    }
    texts = [fenced(code) for code in usual.values()]
    assert dict(zip(usual, scores(open_("code:tests"), *texts, tests="pass"), strict=True)) == dict.fromkeys(
        usual, 1.0
    )
    assert not seen.warnings
