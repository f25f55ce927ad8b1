"""--chat_template: built-in templates and files, which replace the template of the model and go with the result."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import make_config
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError
from crosstune.data.render.built_in_templates import TEMPLATES, read_template
from crosstune.data.render.rendering import encode_conversation, render
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.adapter_files import has_trained_template
from crosstune.recipes.sft import SftRecipe

TURNS = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "eins"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "zwei"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_built_in_template_shows_all_turns_and_teaches_the_answers(tiny_model: Path, name: str) -> None:
    tokenizer = replace(Tokenizer.from_folder(tiny_model), chat_template=read_template(name))
    text = render(TURNS, tokenizer, add_generation_prompt=False)
    places = [text.index(turn["content"]) for turn in TURNS]
    assert places == sorted(places)
    prompt = render(TURNS[:-1], tokenizer, add_generation_prompt=True)
    assert text.startswith(prompt), "an answer follows its prompt as in training"
    example = encode_conversation(TURNS, tokenizer, index=0, whole=False)
    learned = tokenizer.decode(example.tokens[example.supervised].tolist())
    assert "eins" in learned and "zwei" in learned
    assert not any(turn["content"] in learned for turn in TURNS if turn["role"] != "assistant")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_leading_token_is_written_for_tokenizers_that_have_one(name: str) -> None:
    assert read_template(name, adds_bos=True).startswith("{{ bos_token }}")
    assert "bos" not in read_template(name)


def test_the_help_lists_the_built_in_templates() -> None:
    text = options_by_name()["chat_template"].text
    assert all(name in text for name in TEMPLATES)


def test_what_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean llama3"):
        read_template("lama3")
    (tmp_path / "empty.jinja").touch()
    with pytest.raises(UserError, match="is empty"):
        read_template(str(tmp_path / "empty.jinja"))


@pytest.fixture
def data(write_jsonl: Any) -> Path:
    path: Path = write_jsonl([{"prompt": f"q {n}", "completion": "answer"} for n in range(4)])
    return path


def opened(data: Path, model: Path, **options: Any) -> SftRecipe:
    return SftRecipe(make_config(dataset=str(data), skip_eval=True, **options), model_folder=model)


def test_a_template_replaces_the_one_of_the_model(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}")
    plain, own = opened(data, tiny_model), opened(data, tiny_model, chat_template=str(file))
    assert own.tokenizer.decode(own.train[0].tokens.tolist(), keep_special=True).startswith(
        "[user]q 0<|im_end|>"
    )
    assert own.identity() != plain.identity()
    assert own.train.identity != plain.train.identity


def test_the_result_keeps_the_template_and_its_end(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The answers end with a special token that is not an end token of the model."""
    model, result = tmp_path / "model", tmp_path / "result"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}")
    shutil.copytree(model, result)
    recipe = opened(data, model, chat_template=str(tmp_path / "t.jinja"))
    end = recipe.tokenizer.rust.token_to_id("<|im_start|>")
    assert end in recipe.tokenizer.stop_ids and end not in Tokenizer.from_folder(model).stop_ids
    recipe.complete_result(result)
    found = Tokenizer.from_folder(result)
    assert (found.chat_template, found.stop_ids) == (
        recipe.tokenizer.chat_template,
        recipe.tokenizer.stop_ids,
    )
    assert has_trained_template(result)
    again = opened(data, model, base_adapter=str(result), train_type="lora").describe()
    assert any(f"--chat_template {result / 'chat_template.jinja'}" in line for line in again["warnings"])


def test_marks_without_a_token_are_named(data: Path, tiny_model: Path) -> None:
    [warning] = [
        w for w in opened(data, tiny_model, chat_template="llama3").describe()["warnings"] if "template" in w
    ]
    assert "<|eot_id|>" in warning and "not in this model's vocabulary" in warning
    assert "warnings" not in opened(data, tiny_model, chat_template="chatml").describe()


def test_a_model_keeps_its_own_files_without_the_option(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    shutil.copytree(tiny_model, result)
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    opened(data, tiny_model).complete_result(result)
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    assert (
        not json.loads((result / "crosstune.json").read_text()).get("chat_template")
        if (result / "crosstune.json").exists()
        else True
    )
