"""Open the rewards of every command of docs/guide/rewards.md as written, and score answers with them."""

from __future__ import annotations

import http.server
import json
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page

import crosstune
from crosstune.config.load import load_config
from crosstune.core.events import Observers
from crosstune.core.rewards import ScoredAnswer, weighted_sum
from crosstune.recipes.rl.rewards.open_rewards import OpenedRewards, open_rewards
from crosstune.runs.judges import find_judge_scorer

PAGE = Page("rewards.md")
TRAIN = "crosstune train --recipe rl --dataset "
COLUMNS = {
    "answer": "42",
    "keywords": ["answer", "42"],
    "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 1"],
}
ADDRESS = "127.0.0.1:8000"


class Grader(http.server.BaseHTTPRequestHandler):
    """A model that knows the right answer."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "large"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][0]["content"]
        assert "10: right and polite." in text
        said = "Score: 5/10" if text.endswith("42") else "Score: 0/10"
        self._send({"choices": [{"message": {"content": said}}]})

    def _send(self, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    home = tmp_path_factory.mktemp("page")
    for path, code in PAGE.files().items():
        (home / path).write_text(code)
    rows = [{"task": f"t{n}", "answer": "42" if n % 2 else "no", "score": 1 + 4 * (n % 2)} for n in range(30)]
    (home / "labeled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, name in enumerate(("grader", "checker")):
        crosstune.train(
            recipe="judge", model_name=str(tiny_model), dataset=str(home / "labeled.jsonl"), max_steps=2, backend="cpu",
            precision="fp32", skip_eval=True, output_dir=str(home / "runs"), name=name, progress=False, score_scale="1-5",
            seed=seed,
        )  # fmt: skip
    return home


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def opened(home: Path, server: str) -> Iterator[list[OpenedRewards]]:
    """The rewards of the page's commands, in order."""
    found: list[OpenedRewards] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for command in PAGE.commands():
            if not command.startswith("crosstune "):
                subprocess.run(command, shell=True, check=True)
                continue
            assert command.startswith(TRAIN), command
            words = shlex.split(command.replace(ADDRESS, server).removeprefix(TRAIN))[1:]
            # The data and the model of the page belong to the recipe; these are the options of rewards.
            config = load_config(words, environment={})
            found.append(
                open_rewards(config, backend="cpu", observer=Observers(), open_judge=find_judge_scorer)
            )
        yield found
        for one in found:
            one.close()


def scores(rewards: OpenedRewards, *texts: str) -> list[list[float]]:
    prompt = [{"role": "user", "content": "What is 40 + 2?"}]
    asked = [ScoredAnswer(prompt=prompt, answer=text, columns=COLUMNS) for text in texts]
    return rewards.score(asked).tolist()


def test_every_command_of_the_page_opens(opened: list[OpenedRewards]) -> None:
    assert len(opened) == 12
    assert [one.names for one in opened][:2] == [["number", "length"]] * 2
    assert [list(one.weights) for one in opened][:2] == [[1.0, 0.1]] * 2
    assert weighted_sum(np.array(scores(opened[0], "It is 42.")), opened[0].weights).tolist() == [1.1]


def test_the_function_of_the_page(opened: list[OpenedRewards]) -> None:
    rewards = opened[2]
    assert (rewards.names, rewards.weights) == (["near", "brief"], [1.0, 0.5])
    found = scores(rewards, "It is 40.", "no idea")
    assert found[0] == [-2.0, 0.25] and np.isnan(found[1][0])


def test_the_checks_of_the_page(opened: list[OpenedRewards]) -> None:
    exact, tagged, keywords, pattern, schema = opened[3:8]
    assert scores(exact, "42", "It is 42.") == [[1.0], [0.0]]
    assert scores(tagged, "<think>40 + 2</think><answer>42</answer>", "42") == [[1.0, 1.0], [0.0, 1.0]]
    assert scores(keywords, "The answer is 42, I think.") == [[1.0, 1.0]]
    assert scores(pattern, "The answer is 42.", "42") == [[1.0], [0.0]]
    assert scores(schema, '{"sum": 42}', '{"sum": "42"}') == [[1.0], [0.0]]


def test_the_code_of_the_page(opened: list[OpenedRewards]) -> None:
    assert scores(opened[8], "```python\ndef add(a, b):\n    return a + b\n```", "a + b") == [[0.5], [0.0]]


def test_the_judges_and_the_server_of_the_page(opened: list[OpenedRewards]) -> None:
    judge, watched, server = opened[9:]
    [[alone]] = scores(judge, "42")
    assert 0 <= alone <= 1 and judge.names == ["judge_grader"]
    assert watched.names == ["judge_grader", "watch/checker"] and watched.weights == [1.0, 0.0]
    assert scores(server, "42", "43") == [[0.5], [0.0]]
