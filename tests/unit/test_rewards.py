"""Rewards of answers: functions and code in real child processes, checks, and a real server on loopback; bad input of each."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.config.options.rewards import RewardSpec, parse_rewards
from crosstune.core.errors import ConfigError, UserError
from crosstune.core.events import Event, RewardPrinted, StepMetrics, Warned
from crosstune.core.rewards import RewardUnavailable, ScoredAnswer
from crosstune.recipes.rl.rewards.answer_checks import last_number
from crosstune.recipes.rl.rewards.open_rewards import OpenedRewards, open_rewards

QUESTION = [{"role": "user", "content": "What is 40 + 2?"}]
FUNCTIONS = """
import os, time
import sibling

def length(prompts, completions, answer, **kwargs):
    print("called with", sorted(kwargs), type(prompts[0]).__name__)
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(len(text)) if text else None for text in texts]

def only_completions(completions):
    return [sibling.VALUE] * len(completions)

def array(completions, **kwargs):
    import numpy as np
    return np.arange(len(completions), dtype=np.float32)

def state(completions, **kwargs):
    sibling.calls += 1
    return [sibling.calls] * len(completions)

def few(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["high", float("nan"), 2, True]

def one_text(completions, **kwargs):
    return "good"

def nothing(completions, **kwargs):
    return None

def fails(completions, **kwargs):
    return [1 / 0 for _ in completions]

def leaves(completions, **kwargs):
    raise SystemExit(0)

def forks(completions, **kwargs):
    os.fork()
    return [float(len(one[0]["content"])) for one in completions]

def huge(completions, **kwargs):
    return [1e308] * len(completions)

def dies_once(completions, **kwargs):
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(7)
    return [1.0] * len(completions)

def slow_once(completions, **kwargs):
    if not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(60)
    return [1.0] * len(completions)

def large(completions, **kwargs):
    return [len(bytearray(2 << 30))] * len(completions)

def floods(completions, **kwargs):
    for _ in range(20000):
        print("x" * 100)
    return [1.0] * len(completions)

def reads(completions, **kwargs):
    return [float(len(input()))] * len(completions)

async def later(completions, **kwargs):
    return [1.0]

number = 3
"""


@dataclass
class Seen:
    """An observer that keeps the events."""

    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_step(self, metrics: StepMetrics) -> None: ...

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]

    @property
    def printed(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, RewardPrinted))


Open = Callable[..., OpenedRewards]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def open_(seen: Seen) -> Iterator[Open]:
    """Open rewards that are closed at the end of the test."""
    opened: list[OpenedRewards] = []

    def open_these(reward: str, **options: Any) -> OpenedRewards:
        def no_judge(name: str, *, backend: str) -> Any:
            raise AssertionError("no judge is asked for")

        config = make_config(reward=reward, **options)
        opened.append(open_rewards(config, backend="cpu", observer=seen, open_judge=no_judge))
        return opened[-1]

    yield open_these
    for one in opened:
        one.close()


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "sibling.py").write_text("VALUE = 0.25\ncalls = 0\n")
    return str(tmp_path / "functions.py")


def answers(*texts: str, is_text: bool = False, **columns: Any) -> list[ScoredAnswer]:
    return [
        ScoredAnswer(prompt=QUESTION, answer=text, columns=dict(columns), is_text=is_text) for text in texts
    ]


def scores(rewards: OpenedRewards, *texts: str, **columns: Any) -> list[float]:
    """Return the scores of the first reward; None for nan."""
    return [
        None if np.isnan(one) else one for one in rewards.score(answers(*texts, **columns))[:, 0].tolist()
    ]


def test_a_list_of_rewards_is_read_with_its_weights() -> None:
    text = "exact:answer*0.5, tags:think,answer,json,regex:^a{1,2}\\d*5,regex:b * -2,json:s.json, my dir/f.py:g*.25"
    assert [(one.text, one.weight) for one in parse_rewards(text)] == [
        ("exact:answer", 0.5),
        ("tags:think,answer", 1.0),
        ("json", 1.0),
        ("regex:^a{1,2}\\d*5", 1.0),
        ("regex:b", -2.0),
        ("json:s.json", 1.0),
        ("my dir/f.py:g", 0.25),
    ]
    assert parse_rewards("a.py:f")[0] == RewardSpec(
        text="a.py:f", kind="function", argument="a.py", function="f"
    )
    assert [one.weight for one in parse_rewards("json,exact:a", "0,2")] == [0.0, 2.0]
    assert make_config(reward={"exact:a": 0.5, "json": 1}).reward == "exact:a*0.5,json*1"
    assert make_config(reward=["exact:a", "json"]).reward == "exact:a,json"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"reward": "exat:answer"}, "each one of FILE.py:FUNCTION"),
        ({"reward": "exact"}, "exact:COLUMN"),
        ({"reward": "regex:("}, "this one is not"),
        ({"reward": "length:9-2"}, "MIN at most MAX"),
        ({"reward": "tags:a,<b>"}, "tags:NAME,NAME"),
        ({"reward": "json:"}, "json, json:SCHEMA_FILE"),
        ({"reward": "json*1234567890"}, "each one of"),
        ({"reward": "json", "reward_weights": "x"}, "in the order of --reward"),
        ({"reward_timeout": "soon"}, "a duration such as"),
        ({"reward_memory": "0"}, "from 0.1 to"),
    ],
)
def test_a_wrong_list_is_rejected_with_the_forms(asked: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(**asked)


def test_names_are_unique_and_weights_are_in_order(open_: Open, functions: str) -> None:
    rewards = open_(f"json,{functions}:array*2,json*0")
    assert rewards.names == ["json", "array", "json_2"] and rewards.weights == [1.0, 2.0, 0.0]
    found = rewards.score(answers("[]", "no"))
    assert found.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]] and found.dtype == np.float64
    assert rewards.score([]).shape == (0, 3)
    for weights in ("1", "1,2,3"):
        with pytest.raises(UserError, match="does not match"):
            open_("json,exact:a", reward_weights=weights)
    with pytest.raises(UserError, match="does not match") as caught:
        open_("json*2,exact:a", reward_weights="1,2")
    assert "no weights in --reward itself" in caught.value.do


def test_a_function_has_the_arguments_of_trl(open_: Open, functions: str, seen: Seen) -> None:
    rewards = open_(f"{functions}:length")
    assert scores(rewards, "four", "", answer="42", level=3) == [4.0, None]
    assert seen.printed == "called with ['level'] list" and not seen.warnings
    found = rewards.score(answers("four", is_text=True, answer="42"))
    assert found.tolist() == [[4.0]] and seen.printed.endswith("called with [] str")
    assert scores(open_(f"{functions}:only_completions"), "a", "b", answer="1") == [0.25, 0.25]
    assert scores(open_(f"{functions}:array"), "a", "b") == [0.0, 1.0]
    kept = open_(f"{functions}:state")
    assert [scores(kept, "a"), scores(kept, "a")] == [[1.0], [2.0]]  # the same process


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("few", [None] * 4, "it returned 1 scores for 4 answers"),
        ("words", [None, None, 2.0, 1.0], "it returned 'high', which is not a number"),
        ("one_text", [None] * 4, "it returned 'good' instead of a list of numbers"),
        ("nothing", [None] * 4, "it returned None instead of a list"),
        ("fails", [None] * 4, "ZeroDivisionError: division by zero"),
        ("leaves", [None] * 4, "SystemExit"),
        ("huge", [None] * 4, "it returned 1e+308"),
        ("large", [None] * 4, "MemoryError"),
        ("reads", [None] * 4, "EOFError"),
    ],
)
def test_a_bad_function_has_no_score(
    open_: Open, functions: str, seen: Seen, name: str, found: list[float | None], words: str
) -> None:
    rewards = open_(f"{functions}:{name}", reward_memory=1)
    assert scores(rewards, *"abcd") == found
    [said] = seen.warnings
    failed = found.count(None)
    assert said.startswith(f"the reward {name} has no score for {failed} of 4 answers") and words in said
    if name == "fails":
        assert "functions.py, line" in said
    assert rewards.failures == {name: (failed, 4)}


def test_a_reward_that_never_works_stops_the_run(open_: Open, functions: str) -> None:
    rewards = open_(f"{functions}:fails,{functions}:only_completions")
    with pytest.raises(UserError, match="fails failed for all") as caught:
        for _ in range(100):
            rewards.score(answers("a", "b"))
    assert "ZeroDivisionError" in caught.value.why and "functions.py, line" in caught.value.why
    seldom = open_(f"{functions}:dies_once,{functions}:few*0")
    for _ in range(100):
        seldom.score(answers("a", "b"))


def test_a_function_that_forks_answers_once(open_: Open, functions: str) -> None:
    rewards = open_(f"{functions}:forks")
    texts = ("a", "bbbb", "cc", "ddd", "eeeee")
    assert [scores(rewards, text) for text in texts] == [[float(len(text))] for text in texts]


def test_a_function_that_dies_or_hangs_is_started_again(open_: Open, functions: str, seen: Seen) -> None:
    dies = open_(f"{functions}:dies_once")
    assert [scores(dies, "a"), scores(dies, "a")] == [[None], [1.0]]
    assert "its process ended with exit code 7" in seen.warnings[0]
    slow = open_(f"{functions}:slow_once", reward_timeout="1s")
    assert [scores(slow, "a"), scores(slow, "a")] == [[None], [1.0]]
    assert "it did not return within 1 s" in seen.warnings[1]


def test_a_function_that_can_no_longer_be_imported_has_no_score(
    open_: Open, functions: str, seen: Seen
) -> None:
    rewards = open_(f"{functions}:dies_once")
    text = Path(functions).read_text()
    Path(functions).write_text("def f(:")
    assert [scores(rewards, "a") for _ in range(3)] == [[None]] * 3
    assert "exit code 7" in seen.warnings[0] and all("SyntaxError" in said for said in seen.warnings[1:])
    Path(functions).write_text(text)
    assert scores(rewards, "a") == [1.0]


def test_warnings_are_counted_and_do_not_flood(open_: Open, functions: str, seen: Seen) -> None:
    rewards = open_(f"{functions}:few,{functions}:floods")
    for _ in range(12):
        rewards.score(answers("a", "b"))
    assert len(seen.warnings) == 4 and "(20 of 20 so far)" in seen.warnings[-1]
    assert rewards.failures == {"few": (24, 24), "floods": (0, 24)}
    assert len(seen.printed) < 12 * 2100


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{0}:missing", "has no attribute 'missing'"),
        ("{0}:number", "number is not a function"),
        ("{0}:later", "later is async"),
        ("wrong.py:f", "SyntaxError"),
        ("none.py:f", "There is no file none.py"),
    ],
)
def test_a_function_that_cannot_be_imported_stops_the_start(
    open_: Open, functions: str, spec: str, words: str
) -> None:
    Path("wrong.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=words.replace("(", "\\(")) as caught:
        open_(spec.format(functions))
    assert caught.value.exit_code == 2


def test_a_function_with_wrong_arguments_ends_the_run_at_its_first_answers(
    open_: Open, functions: str, seen: Seen
) -> None:
    Path("wrong.py").write_text("def f(prompt, answer):\n    return 1.0\n")
    rewards = open_("wrong.py:f")
    with pytest.raises(UserError, match="missing a required argument: 'prompt'") as caught:
        scores(rewards, "a", answer="42")
    assert "prompts, completions, answer" not in caught.value.do and "completions" in caught.value.why
    length = open_(f"{functions}:length")
    assert scores(length, "four", answer="42") == [4.0]
    assert scores(length, "four") == [None]  # rows of another source
    assert "missing a required argument: 'answer'" in seen.warnings[0]


def test_closing_ends_the_children(open_: Open, functions: str) -> None:
    (Path(functions).parent / "pid.py").write_text(
        "import os\ndef pid(completions, **kwargs):\n    return [float(os.getpid())]\n"
    )
    rewards = open_("pid.py:pid")
    [pid] = scores(rewards, "a")
    os.kill(int(pid), 0)
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


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


class Model(http.server.BaseHTTPRequestHandler):
    """A model that gives the number of characters of the answer, and records what it was asked."""

    asked: list[dict[str, Any]]
    failures: list[int]
    """Statuses of the next requests; 0 closes the connection."""
    reply: str

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "small"}, {"id": "large"}]})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status = self.failures.pop() if self.failures else 200
        if not status:
            self.close_connection = True
            return
        answer = self.asked[-1]["messages"][0]["content"].rpartition("Answer: ")[2]
        text = self.reply.replace("N", str(len(answer)))
        self._send(status, {"choices": [{"message": {"content": text}}], "error": {"message": "busy"}})

    def _send(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def model() -> Iterator[tuple[type[Model], str]]:
    kind = type("OneModel", (Model,), {"asked": [], "failures": [], "reply": "Score: N/10"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield kind, f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture
def rubric(tmp_path: Path) -> str:
    (tmp_path / "rubric.txt").write_text("Short answers are better.\n")
    return str(tmp_path / "rubric.txt")


def test_a_server_scores_with_the_rubric(
    open_: Open, model: tuple[type[Model], str], rubric: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for this machine
    kind, url = model
    rewards = open_(f"server:{url}#large*0.5", rubric=rubric)
    assert rewards.names == ["server"] and rewards.weights == [0.5]
    assert scores(rewards, "four", "a", "ten chars.", reference="forty-two") == [0.4, 0.1, 1.0]
    [first, *_] = kind.asked
    text = first["messages"][0]["content"]
    assert (first["model"], first["temperature"], len(kind.asked)) == ("large", 0.0, 3)
    assert "Rubric: Short answers are better." in text and "Task: What is 40 + 2?" in text
    assert "Reference: forty-two" in text and "from 0 (worst) to 10 (best)" in text
    kind.reply = "<think>Score: 9/10?</think>Score: 3/10"
    assert scores(rewards, "a") == [0.3]
    kind.reply = "It is good."
    assert (
        scores(rewards, "a") == [None] and "wrote no score from 0 to 10: 'It is good.'" in seen.warnings[-1]
    )
    kind.reply = "Score: 11/10"
    assert scores(rewards, "a") == [None]


def test_a_server_that_goes_away_is_waited_for(
    open_: Open, model: tuple[type[Model], str], rubric: str, seen: Seen
) -> None:
    kind, url = model
    rewards = open_(f"server:{url}", rubric=rubric, reward_patience="20s")
    kind.failures = [0, 503, 429]
    assert scores(rewards, "four", "a") == [0.4, 0.1]
    assert seen.warnings and "Trying again in 1 s" in seen.warnings[0]
    kind.failures = [400]  # as for an answer beyond the server's context
    assert sorted(scores(rewards, "four", "four"), key=str) == [0.4, None]
    assert "no score for 1 of 2 answers" in seen.warnings[-1] and "status 400. busy" in seen.warnings[-1]
    kind.failures = [401]
    with pytest.raises(UserError, match="rejects the key") as caught:
        scores(rewards, "a")
    assert not isinstance(caught.value, RewardUnavailable)


def test_a_server_that_stays_away_ends_the_run(
    open_: Open, model: tuple[type[Model], str], rubric: str, seen: Seen
) -> None:
    kind, url = model
    rewards = open_(f"server:{url}", rubric=rubric, reward_patience="2.5s")
    kind.failures = [503] * 100
    start = time.monotonic()
    with pytest.raises(RewardUnavailable, match="did not come back within") as caught:
        scores(rewards, "a")
    assert caught.value.exit_code == 2 and "--resume auto" in caught.value.do and "busy" in caught.value.why
    assert time.monotonic() - start > 2.4 and len(seen.warnings) == 2


def test_a_server_on_another_machine_needs_permission(open_: Open, rubric: str) -> None:
    with pytest.raises(UserError, match="is on another machine") as caught:
        open_("server:https://judge.example/v1", rubric=rubric)
    assert "--allow_remote_rewards" in caught.value.do
    with pytest.raises(UserError, match="does not answer"):
        open_("server:http://127.0.0.2:1/v1", rubric=rubric, allow_remote_rewards=True)
    with pytest.raises(UserError, match="does not answer"):
        open_("server:http://127.0.0.1:1/v1", rubric=rubric)
    with pytest.raises(UserError, match="not the address of a server"):
        open_("server:http://[", rubric=rubric)
    with pytest.raises(UserError, match="needs a rubric"):
        open_("server:http://127.0.0.1:1/v1")


def test_the_key_of_a_server_is_in_the_environment(
    open_: Open, model: tuple[type[Model], str], rubric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = model
    keys: list[str | None] = []
    send = kind._send
    monkeypatch.setattr(
        kind, "_send", lambda self, *a: (keys.append(self.headers["Authorization"]), send(self, *a))
    )
    monkeypatch.setenv("CROSSTUNE_REWARD_KEY", "abc")
    scores(open_(f"server:{url}", rubric=rubric), "a")
    assert keys == ["Bearer abc", "Bearer abc"]


def test_the_identity_is_that_of_the_contents(
    open_: Open, functions: str, tmp_path: Path, model: tuple[type[Model], str], rubric: str
) -> None:
    text = f"{functions}:array,exact:answer,server:{model[1]}"
    first = open_(text, rubric=rubric).identity()
    assert open_(text, rubric=rubric, reward_timeout="5s").identity() == first
    assert open_(f"{text},length:1-3*0", rubric=rubric).identity() == first
    assert open_(text.replace("exact:answer", "exact:answer*-2"), rubric=rubric).identity() != first
    (tmp_path / "moved").mkdir()
    for name in ("functions.py", "sibling.py"):
        (tmp_path / "moved" / name).write_bytes((tmp_path / name).read_bytes())
    moved = text.replace(functions, str(tmp_path / "moved" / "functions.py"))
    assert open_(moved, rubric=rubric).identity() == first
    assert open_(text.replace("exact:answer", "exact:other"), rubric=rubric).identity() != first
    Path(functions).write_text(f"{FUNCTIONS}\n# changed\n")
    changed = open_(text, rubric=rubric).identity()
    Path(rubric).write_text("Long answers are better.")
    assert len({first, changed, open_(text, rubric=rubric).identity()}) == 3
