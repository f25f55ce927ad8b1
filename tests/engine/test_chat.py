"""`crosstune chat` and `crosstune generate` with a real tiny model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.core.events import Observers
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.results.chat_model import ChatModel, open_chat_model

MODEL = ("--backend", "cpu", "--precision", "fp32", "--max_new_tokens", "4")


def test_commands_are_not_sent_to_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["/sav x", "/etc/passwd", "/save", "hello", "/system Be brief.", "//etc is a folder"]
    typed += ["/save chat.jsonl", "/reset", "/load chat.jsonl", "/save again.jsonl", "/help", "/exit", "no"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    assert main(["chat", str(tiny_model), *MODEL]) == 0
    said = capsys.readouterr().err
    assert "Unknown command /sav;" in said and "Unknown command /etc" in said
    assert "/save needs" in said and "/system TEXT" in said
    saved = json.loads((tmp_path / "chat.jsonl").read_text(encoding="utf-8"))["messages"]
    assert [(turn["role"], turn["content"]) for turn in saved if turn["role"] != "assistant"] == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("user", "/etc is a folder"),
    ]
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "chat.jsonl").read_text()


def test_a_file_of_prompts_is_answered_as_each_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["Hello", "Turn on the lamp in the kitchen.", "What?"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ["generate", str(tiny_model), *MODEL]
    output = tmp_path / "answers.jsonl"
    many = [*words, "--prompt_file", str(tmp_path / "prompts.txt"), "--output", str(output)]
    many += ["--batch_size", "2"]
    assert main(many) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    capsys.readouterr()
    for row in rows:
        assert main([*words, "--prompt", row["prompt"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == row
    assert main(many) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*many, "--overwrite"]) == 0


def test_a_failed_start_leaves_no_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tmp_path / "none"), "--prompt", "x", "--output", str(tmp_path / "answers.jsonl")]
    assert main(words) == 2
    assert not (tmp_path / "answers.jsonl").exists()


def test_sampled_answers_do_not_depend_on_the_batches(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("Hello\nWhat?\nHello\nHello\nHi\nWhat?\n")
    words = ["generate", str(tiny_model), *MODEL, "--prompt_file", str(tmp_path / "prompts.txt"), "--json"]
    words += ["--temperature", "2"]

    def answers(seed: int, batch_size: int) -> list[str]:
        assert main([*words, "--seed", str(seed), "--batch_size", str(batch_size)]) == 0
        return [row["answer"] for row in json.loads(capsys.readouterr().out)["answers"]]

    last = answers(2**63 - 1, 64)
    assert last == answers(2**63 - 1, 1) == answers(2**63 - 1, 2)
    assert len(set(last)) == 6  # equal prompts have different answers
    assert set(answers(1, 1)).isdisjoint(answers(2, 1))
    assert main([*words, "--seed", str(2**63)]) == 2
    assert "2**63 - 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def short_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "short"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return folder


def test_a_prompt_longer_than_the_context_is_refused(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "word " * 200
    Path("prompts.txt").write_text(f"Hello\n\n{long}\n")
    words = ["generate", str(short_model), *MODEL]
    assert main([*words, "--prompt_file", "prompts.txt", "--output", "answers.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "prompts.txt, line 3, is too long" in said and "context of 64" in said
    assert "skipped 1 empty line" in said
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]
    Path("prompts.txt").write_text(f"Hello\n{long}\nHello\n{long}\n")
    assert main([*words, "--prompt_file", "prompts.txt"]) == 2
    assert (
        "2 prompts are too long for this model: prompts.txt, line 2; prompts.txt, line 4"
        in capsys.readouterr().err
    )
    assert main([*words, "--prompt", long]) == 2
    assert "The prompt is too long" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n{long}\n/save chat.jsonl\n"))
    assert main(["chat", str(short_model), *MODEL]) == 0
    assert "too long" in capsys.readouterr().err
    [saved] = [json.loads(line)["messages"] for line in Path("chat.jsonl").read_text().splitlines()]
    assert [turn["role"] for turn in saved] == ["user", "assistant"]


def test_an_answer_ends_where_the_context_ends(tiny_model: Path) -> None:
    model = open_chat_model(str(tiny_model), observer=Observers(), backend="cpu", precision="fp32")
    talks = [[{"role": "user", "content": text}] for text in ("Hello", "Turn on the lamp in the kitchen.")]
    short, long = model.encode(talks, ["", ""])
    model = replace(model, tokenizer=replace(model.tokenizer, stop_ids=frozenset()), max_tokens=None)
    lengths: list[int] = []
    unlimited = [
        model.continue_tokens([short], max_new_tokens=9)[0],
        model.continue_tokens([long], max_new_tokens=2, on_token=lengths.append)[0],
    ]
    assert len(lengths) == 2
    limited = replace(model, max_tokens=len(long) + 2)
    assert limited.answers(talks, max_new_tokens=9) == unlimited


@dataclass
class Parrot:
    """A session that always gives the same tokens."""

    tokens: list[int]

    def generate(
        self, prompts: Sequence[Any], *, on_token: Callable[[int], None] | None = None, **_: Any
    ) -> list[list[int]]:
        for token in self.tokens if on_token is not None else ():
            on_token(token)
        return [self.tokens for _ in prompts]


def test_streamed_text_is_the_exact_answer(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    for text in (" a b \n", "\N{EURO SIGN}"):
        tokens = list(tokenizer.encode(text).ids)
        if text == "\N{EURO SIGN}":
            tokens = tokens[:-1]  # an incomplete character
        session: Any = Parrot(tokens)
        heard: list[str] = []
        model = ChatModel(session=session, tokenizer=tokenizer)
        answer = model.answer([{"role": "user", "content": "?"}], max_new_tokens=9, on_text=heard.append)
        assert "".join(heard) == answer == tokenizer.decode(tokens)
        assert answer in (text, "\N{REPLACEMENT CHARACTER}" * len(answer)) and answer
