"""Rewards by judges and reward models that are trained here: their scores, another tokenizer, a judge that watches, bad input."""

from __future__ import annotations

import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crosstune
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Observers, StepMetrics, Warned
from crosstune.core.rewards import ScoredAnswer
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.rl.rewards.open_rewards import OpenedRewards, open_rewards
from crosstune.runs.judges import find_judge_scorer

TEXTS = ["a good text", "a bad text", "the weather of tomorrow", ""]
PAIRS = [{"task": f"t{n}", "answer_a": "good", "answer_b": "bad", "winner": "A"} for n in range(30)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judges")


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, home: Path) -> Path:
    """The tiny model with a tokenizer that joins no characters."""
    folder = home / "other"
    shutil.copytree(tiny_model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def train(model: Path, home: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> Path:
    data = home / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = crosstune.train(
        recipe="judge", model_name=str(model), dataset=str(data), backend="cpu", precision="fp32", skip_eval=True,
        output_dir=str(home), name=name, progress=False, lr=1e-2, **{"max_steps": 2} | options,
    )  # fmt: skip
    return run.folder


@pytest.fixture(scope="module")
def judge(other_model: Path, home: Path) -> Path:
    rows = [
        {"task": f"t{n}", "answer": "good" if n % 2 else "bad", "score": 1 + 4 * (n % 2)} for n in range(30)
    ]
    return train(other_model, home, "scores", rows, score_scale="1-5")


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, home: Path) -> Path:
    return train(tiny_model, home, "reward model", PAIRS, head="scalar", train_type="full")


def open_(observer: Any = None, **options: Any) -> OpenedRewards:
    config = make_config(**options)
    return open_rewards(config, backend="cpu", observer=observer or Observers(), open_judge=find_judge_scorer)


def answers(*texts: str, **columns: Any) -> list[ScoredAnswer]:
    prompt = [{"role": "user", "content": "Write a text."}]
    return [ScoredAnswer(prompt=prompt, answer=text, columns=columns) for text in texts]


def predictions(judge: Path, home: Path) -> list[dict[str, Any]]:
    """Return what `crosstune judge predict` says about the texts."""
    items, out = home / "items.jsonl", home / f"{judge.name}.verdicts.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Write a text."},
                {"role": "assistant", "content": text},
            ]
        }
        if judge.name == "reward model"
        else {"task": "Write a text.", "answer": text}
        for text in TEXTS[:-1]
    ]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["judge", "predict", str(judge), "--input", str(items), "--output", str(out)]
    assert main([*words, "--backend", "cpu", "--overwrite"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_judge_scores_as_predict_does_with_its_own_tokenizer(
    judge: Path, tiny_model: Path, other_model: Path, home: Path
) -> None:
    ours, theirs = (Tokenizer.from_folder(folder) for folder in (tiny_model, other_model))
    assert len(theirs.encode("language model").ids) > len(ours.encode("language model").ids)
    rewards = open_(reward=f"judge:{judge}*0.5")
    assert rewards.names == ["judge_scores"] and rewards.weights == [0.5]
    found = rewards.score(answers(*TEXTS))[:, 0]
    expected = [(row["predicted"] - 1) / 4 for row in predictions(judge, home)]
    assert found[:-1] == pytest.approx(expected, abs=1e-4)
    assert np.isfinite(found).all() and 0 <= found.min() < found.max() <= 1


def test_a_reward_model_gives_its_rewards(reward_model: Path, home: Path) -> None:
    rewards = open_(reward=f"judge:{reward_model}")
    assert rewards.names == ["judge_reward_model"]
    found = rewards.score(answers(*TEXTS[:-1]))[:, 0]
    expected = [row["predicted"] for row in predictions(reward_model, home)]
    assert found == pytest.approx(expected, abs=1e-4) and found.std() > 0


def test_an_empty_answer_has_a_reward_and_does_not_move_those_of_others(reward_model: Path) -> None:
    rewards = open_(reward=f"judge:{reward_model}")
    alone = [rewards.score(answers(text))[0, 0] for text in ("", "a good text", " \n")]
    together = rewards.score(answers("", "a good text", " \n"))[:, 0]
    assert together == pytest.approx(alone, abs=1e-4) and np.isfinite(alone).all()
    assert alone[0] != pytest.approx(alone[1], abs=1e-4)


def test_a_judge_watches_without_weight(judge: Path, reward_model: Path) -> None:
    rewards = open_(reward=f"length:1-3,judge:{reward_model}", watch_judge=str(judge))
    assert rewards.names == ["length", "judge_reward_model", "watch/scores"]
    assert rewards.weights == [1.0, 1.0, 0.0]
    found = rewards.score(answers("a good text"))
    alone = open_(reward=f"judge:{judge}").score(answers("a good text"))
    assert found[0, 2] == pytest.approx(alone[0, 0], abs=1e-6) and found[0, 0] == 1.0


def test_an_answer_beyond_the_judges_context_has_no_score(judge: Path) -> None:
    said: list[str] = []

    class Seen:
        def on_event(self, event: Event) -> None:
            if isinstance(event, Warned):
                said.append(event.message)

        def on_step(self, metrics: StepMetrics) -> None: ...

    found = open_(Seen(), reward=f"judge:{judge}").score(answers("word " * 1000, "good"))[:, 0]
    assert np.isnan(found[0]) and np.isfinite(found[1])
    assert said[-1].endswith("no score for 1 of 2 answers: it exceeds the judge's context")


def test_the_identity_is_that_of_the_weights(judge: Path, reward_model: Path, tmp_path: Path) -> None:
    first = open_(reward=f"judge:{judge}").identity()
    shutil.copytree(judge, tmp_path / "moved")
    assert open_(reward=f"judge:{tmp_path / 'moved'}").identity() == first
    assert open_(reward=f"judge:{reward_model}").identity() != first


def test_a_judge_that_cannot_score_is_rejected_by_name(tiny_model: Path, home: Path) -> None:
    pairs = train(tiny_model, home, "winner", PAIRS)
    for name, words in (
        (pairs, "winner' cannot give rewards"),
        (tiny_model, "is not a judge"),
        (home / "none", "none"),
    ):
        with pytest.raises(UserError, match=words):
            open_(reward=f"judge:{name}")
        with pytest.raises(UserError, match=words):
            open_(reward="json", watch_judge=str(name))
    with pytest.raises(UserError, match="There is no reward"):
        open_()


@pytest.mark.cuda
def test_a_judge_scores_alike_on_a_gpu(judge: Path, reward_model: Path) -> None:
    text = f"judge:{judge},judge:{reward_model}"
    found = []
    for backend in ("cpu", "cuda"):
        config = make_config(reward=text)
        rewards = open_rewards(config, backend=backend, observer=Observers(), open_judge=find_judge_scorer)
        found.append(rewards.score(answers(*TEXTS)))
        rewards.close()
    assert np.isfinite(found[0]).all() and found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.slow
def test_a_reward_that_pays_for_digits_is_hacked_and_the_run_says_so(tiny_model: Path, home: Path) -> None:
    """The model learns to write digits alone, and a judge that learned to prefer words falls on held-out prompts too."""
    draw = random.Random(0)

    def words(alphabet: str) -> str:
        return " ".join("".join(draw.choices(alphabet, k=draw.randint(1, 5))) for _ in range(4))

    letters = string.ascii_lowercase
    pairs = [
        {
            "prompt": f"Say {n} words.",
            "chosen": words(letters),
            "rejected": words(letters + 2 * string.digits),
        }
        for n in range(96)
    ]
    options = {"train_type": "full", "batch_size": 8}
    judge = train(tiny_model, home, "words", pairs, head="scalar", **options | {"max_steps": 30})
    (home / "asked.jsonl").write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in pairs[:24])
    )
    (home / "digits.py").write_text(
        "def digits(completions, **_):\n"
        "    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]\n"
    )
    run = crosstune.train(
        recipe="rl", model_name=str(tiny_model), dataset=str(home / "asked.jsonl"), reward=f"{home}/digits.py:digits",
        watch_judge=str(judge), lr=1e-2, max_steps=30, num_generations=4, max_new_tokens=12, eval_samples=8, backend="cpu",
        precision="fp32", output_dir=str(home), name="hacked", progress=False, **options,
    )  # fmt: skip
    first, last = (event for event in run.events if event["kind"] == "evaluation")
    assert first["metrics"]["reward"] < 0.2 and last["metrics"]["reward"] > 0.9
    watched = [event["metrics"]["rewards/watch/words/mean"] for event in (first, last)]
    assert watched[1] < watched[0] - 3
    assert {"reward hacking", "reward hacking (held out)"} <= set(run.summary["verdicts"])
