"""Rewards of a model behind a server on loopback, and the identity of rewards."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_rewards import Open, Seen, scores

from crosstune.core.errors import UserError
from crosstune.core.rewards import RewardUnavailable


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
    open_: Open, tmp_path: Path, model: tuple[type[Model], str], rubric: str
) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text("def array(completions): ...\n")
    text = f"{functions}:array,exact:answer,server:{model[1]}"
    first = open_(text, rubric=rubric).identity()
    assert open_(text, rubric=rubric, reward_timeout="5s").identity() == first
    assert open_(f"{text},length:1-3*0", rubric=rubric).identity() == first
    assert open_(text.replace("exact:answer", "exact:answer*-2"), rubric=rubric).identity() != first
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "functions.py").write_bytes(functions.read_bytes())
    moved = text.replace(str(functions), str(tmp_path / "moved" / "functions.py"))
    assert open_(moved, rubric=rubric).identity() == first
    assert open_(text.replace("exact:answer", "exact:other"), rubric=rubric).identity() != first
    functions.write_text(f"{functions.read_text()}# changed\n")
    changed = open_(text, rubric=rubric).identity()
    Path(rubric).write_text("Long answers are better.")
    assert len({first, changed, open_(text, rubric=rubric).identity()}) == 3
