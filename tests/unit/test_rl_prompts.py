"""Prompts of the rl recipe: how rows are read, held out and fitted into the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.tiny import tiny_model
from crosstune.recipes.rl.losses import RlLoss
from crosstune.recipes.rl.read_prompts import identity_of, read_prompt, read_prompts, tokenize


def config_of(path: Path, **more: Any) -> Any:
    return make_config(recipe="rl", dataset=str(path), **more)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_messages_and_other_columns() -> None:
    text = read_prompt({"prompt": "One?", "answer": 1, "system": "Be brief."})
    assert text.is_text and [turn["role"] for turn in text.prompt] == ["system", "user"]
    assert text.columns == {"answer": 1, "system": "Be brief."} and text.scored("x").columns["answer"] == 1
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]
    asked = read_prompt({"messages": turns, "solution": "1"})
    assert not asked.is_text and [turn["content"] for turn in asked.prompt] == ["One?"]
    assert read_prompt({"question": "Two?"}).text == "Two?"
    json_text = '[{"a": 1}] Convert this JSON to CSV'
    assert read_prompt({"prompt": json_text}).text == json_text
    assert read_prompt({"prompt": '[{"a": 1}]'}).is_text
    assert not read_prompt({"prompt": '[{"role": "user", "content": "One?"}]'}).is_text


def test_rows_of_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", [{"prompt": f"{number % 10}?", "answer": number} for number in range(60)]
    )
    data = read_prompts(config_of(path, eval_fraction=0.3))
    sides = [{one.text for one in part} for part in (data.train, data.held_out)]
    assert data.held_out and not sides[0] & sides[1] and len(data.train) + len(data.held_out) == 60
    other = read_prompts(config_of(path, eval_fraction=0.3, seed=1))
    assert (
        identity_of(other.train)
        != identity_of(data.train)
        == identity_of(read_prompts(config_of(path, eval_fraction=0.3)).train)
    )


def test_long_prompts_are_an_error_or_dropped(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model(tmp_path / "model"))
    path = write(tmp_path / "p.jsonl", [{"prompt": "short"}, {"prompt": "long " * 200}])
    asked = config_of(path, context_length=64, max_new_tokens=16, skip_eval=True)
    with pytest.raises(UserError, match=r"1 of 2 prompts(?s:.*)line 2"):
        tokenize(read_prompts(asked), tokenizer, config=asked, model_limit=None)
    dropping = config_of(path, context_length=64, max_new_tokens=16, skip_eval=True, truncation="drop")
    found = tokenize(read_prompts(dropping), tokenizer, config=dropping, model_limit=None)
    assert len(found.train) == 1 and found.num_too_long == 1


def test_bad_rows_are_skipped_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "good"}, {"other": 1}])
    data = read_prompts(config_of(path, skip_bad_rows=True, skip_eval=True))
    assert len(data.train) == 1 and json.loads(data.skipped[0])["line"] == 2


def test_the_data_command_reports_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": None}, {"prompt": "long " * 200}, *({"prompt": f"Add {n}"} for n in (1, 1, 2, 3, 4))]
    path = write(tmp_path / "p.jsonl", [{**row, "answer": "7"} for row in rows])
    words = ["data", str(path), "--recipe", "rl", "--model_name", "tiny-random", "--context_length", "600"]
    assert main([*words, "--json", "--skip_eval"]) == 2
    told = capsys.readouterr()
    found = json.loads(told.out)
    counts = {"read": 7, "trained": 5, "held_out": 0, "too_long": 1, "bad": 1, "unused": 0}
    assert (
        found["rows"] == counts
        and found["train"]["duplicates"] == 1
        and found["format"] == "prompts with answer"
    )
    assert "Add 1" in found["shown"][0] and found["stops_at_long"]
    assert "p.jsonl, line 1: The row has no prompt." in told.err and "its column prompt is null" in told.err
    assert main([*words, "--skip_bad_rows"]) == 2
    told = capsys.readouterr()
    assert "1: training stops unless --truncation is drop" in told.out and "left out" not in told.out
    assert "p.jsonl, line 2, has" in told.err
    assert main([*words, "--skip_bad_rows", "--truncation", "drop"]) == 0
    assert "1 left out" in capsys.readouterr().out


def test_defaults_by_loss() -> None:
    def loss(**more: Any) -> RlLoss:
        return RlLoss.from_config(make_config(recipe="rl", **more))

    assert (loss().name, loss().low, loss().high, loss().beta, loss().scale) == (
        "dapo",
        0.2,
        0.2,
        0.0,
        "group",
    )
    gspo = loss(rl_loss="gspo")
    assert (gspo.low, gspo.high) == (3e-4, 4e-4)
    rloo = loss(rl_loss="rloo")
    assert rloo.beta == 0.05 and rloo.scale == "none" and rloo.has_kl_reward and not rloo.has_kl_term
    clipped = loss(epsilon=0.1, epsilon_high=0.28)
    assert (clipped.low, clipped.high) == (0.1, 0.28) and loss(epsilon=0.1).high == 0.1
    assert (
        loss(rl_loss="dr_grpo").scale == "none"
        and loss(rl_loss="dr_grpo", scale_rewards="group").scale == "group"
    )
