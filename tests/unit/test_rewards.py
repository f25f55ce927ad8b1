"""Rewards of functions, in real child processes: their names, weights, arguments and failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opened_rewards import Open, Seen, answers, scores

from crosstune.config.load import make_config
from crosstune.config.options.rewards import RewardSpec, parse_rewards
from crosstune.core.errors import ConfigError, UserError

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


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "sibling.py").write_text("VALUE = 0.25\ncalls = 0\n")
    return str(tmp_path / "functions.py")


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
