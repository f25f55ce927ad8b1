"""Exactly the answers are supervised, for common chat templates; --chat_template replaces the model's template."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.read.formats import as_messages
from crosstune.data.render.built_in_templates import TEMPLATES, read_template
from crosstune.data.render.rendering import encode_conversation, encode_prompt, render, render_conversation
from crosstune.data.render.types import REASONING_KEYS
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.adapter_files import has_trained_template
from crosstune.recipes.sft import SftRecipe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set body = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ body + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER_WITHOUT_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
LAST_IS_SPECIAL = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token if loop.last else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SPECIAL = [
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|User|>",
    "<|Assistant|>",
]
ASKED = [
    {"role": "user", "content": "Größe? 日本語 one two"},
    {"role": "assistant", "content": "Fünf 🙂 Meter."},
    {"role": "user", "content": "And <b>that</b> one?"},
    {"role": "assistant", "content": "Two\nlines, ünd 日本."},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> Tokenizer:
    made = Tokenizer.from_folder(tiny_model)
    made = replace(made, rust=deepcopy(made.rust))
    made.rust.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return replace(made, bos_token="<s>", eos_token="</s>", special=(*made.special, *SPECIAL), num_rows=None)


def spans(example: Example, tokenizer: Tokenizer) -> list[str]:
    """The supervised stretches, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.supervised.astype(int), [0]])))
    return [
        tokenizer.decode(example.tokens[start:end], keep_special=True)
        for start, end in edges.reshape(-1, 2).tolist()
    ]


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (R1, "</s>"),
        (MARKED, "<|im_end|>"),
        (HEADER_WITHOUT_PROMPT, "<|im_end|>"),
        (None, "</s>"),
    ],
    ids=["chatml", "llama3", "r1", "marked", "no-prompt", "plain"],
)
def test_the_answers_and_their_ends_are_supervised_and_nothing_else(
    base: Tokenizer, template: str | None, ending: str
) -> None:
    """The templates of published models are compared with transformers in tests/parity."""
    tokenizer = replace(base, chat_template=template)
    for turns in (ASKED, ASKED[:2], SYSTEM + ASKED):
        example = encode_conversation(turns, tokenizer, index=0, whole=False)
        answers = [turn["content"] + ending for turn in turns if turn["role"] == "assistant"]
        found = [text.removeprefix(" ") for text in spans(example, tokenizer)]
        assert found == answers
        whole = render(turns, tokenizer, add_generation_prompt=False)
        assert tokenizer.decode(example.tokens, keep_special=True) == whole


def test_reasoning_that_is_stripped_from_earlier_turns_is_not_looked_for(base: Tokenizer) -> None:
    tokenizer = replace(base, chat_template=QWEN3)
    turns = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "<think>\nhm one\n</think>\n\neins"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nhm two\n</think>\n\nzwei"},
        {"role": "user", "content": "three?"},
        {"role": "assistant", "content": "drei"},
    ]
    example = encode_conversation(turns, tokenizer, index=0, whole=False)
    assert spans(example, tokenizer) == [
        "eins<|im_end|>",
        "zwei<|im_end|>",
        "<think>\n\n</think>\n\ndrei<|im_end|>",
    ]
    assert spans(encode_conversation(turns[:4], tokenizer, index=0, whole=False), tokenizer)[-1] == (
        "<think>\nhm two\n</think>\n\nzwei<|im_end|>"
    )


def test_content_that_is_trimmed_is_located(base: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": "  one?  "},
        {"role": "assistant", "content": "\n eins  "},
        {"role": "user", "content": "\ntwo"},
        {"role": "assistant", "content": "zwei\n"},
    ]
    example = encode_conversation(turns, replace(base, chat_template=LLAMA3), index=0, whole=False)
    assert spans(example, base) == ["eins<|eot_id|>", "zwei<|eot_id|>"]


def test_consecutive_turns_of_one_speaker(base: Tokenizer) -> None:
    turns = [ASKED[0], ASKED[2], ASKED[1], ASKED[3]]
    example = encode_conversation(turns, replace(base, chat_template=CHATML), index=0, whole=False)
    assert spans(example, base) == ["Fünf 🙂 Meter.<|im_end|>", "Two\nlines, ünd 日本.<|im_end|>"]


def test_an_answer_that_repeats_the_template_is_not_mistaken_for_it(base: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": "eins"},
        {"role": "assistant", "content": "eins"},
        {"role": "user", "content": "assistant\neins"},
        {"role": "assistant", "content": "assistant: eins"},
    ]
    for template, ending in ((CHATML, "<|im_end|>"), (R1, "</s>")):
        example = encode_conversation(turns, replace(base, chat_template=template), index=0, whole=False)
        assert spans(example, base) == [f"eins{ending}", f"assistant: eins{ending}"]


def test_a_template_that_treats_the_last_turn_otherwise(base: Tokenizer) -> None:
    example = encode_conversation(ASKED, replace(base, chat_template=LAST_IS_SPECIAL), index=0, whole=False)
    assert [text.strip() for text in spans(example, base)] == ["Fünf 🙂 Meter.", "Two\nlines, ünd 日本.</s>"]


def test_marks_do_not_reach_the_text(base: Tokenizer) -> None:
    marked, plain = (replace(base, chat_template=template) for template in (MARKED, CHATML))
    for asks in (False, True):
        assert render(ASKED, marked, add_generation_prompt=asks) == render(
            ASKED, plain, add_generation_prompt=asks
        )
    assert encode_prompt(ASKED[:1], marked) == encode_prompt(ASKED[:1], plain)


def test_a_tokenizer_without_end_and_pad_token(base: Tokenizer) -> None:
    bare = replace(base, chat_template=None, eos_token=None, bos_token=None)
    example = encode_conversation(ASKED[:2], bare, index=0, whole=False)
    assert spans(example, bare) == [" Fünf 🙂 Meter.\n"]


def test_the_template_sees_the_same_day_always(base: Tokenizer) -> None:
    tokenizer = replace(base, chat_template="{{ strftime_now('%Y-%m-%d') }}")
    assert render(ASKED, tokenizer, add_generation_prompt=False) == "2025-01-01"


def test_reasoning_is_rendered_under_any_of_its_names(base: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m[KEY] }}:{{ m.content }}\n{% endfor %}"
    for given in REASONING_KEYS:
        turns = as_messages([ASKED[0], {"role": "assistant", "content": "5", given: "[1] add"}])
        for read in ("reasoning_content", "thinking"):
            tokenizer = replace(base, chat_template=template.replace("KEY", repr(read)))
            assert "assistant:[1] add:5" in render(turns, tokenizer, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "ü<", "a": [1]}'),
        ("True", '{"b": "\\u00fc<", "a": [1]}'),
        ("sort_keys=True", '{"a": [1], "b": "ü<"}'),
        ("separators=(',', ':')", '{"b":"ü<","a":[1]}'),
        ("ensure_ascii=False, indent=1", '{\n "b": "ü<",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_has_the_options_of_transformers(base: Tokenizer, options: str, text: str) -> None:
    tokenizer = replace(base, chat_template=f"{{{{ tools[0] | tojson({options}) }}}}")
    tools = [{"b": "ü<", "a": [1]}]
    assert render(ASKED, tokenizer, add_generation_prompt=False, tools=tools) == text


def test_tool_results_inside_an_answer_carry_no_loss(base: Tokenizer) -> None:
    """As in Gemma 4, whose template writes the messages of tools in the turn of the assistant."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}<call>"
        "{% for k in range(loop.index, messages | length) %}"
        "{% if messages[k].role != 'tool' %}{% break %}{% endif %}[{{ messages[k].content }}]{% endfor %}"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    found = {"role": "tool", "content": "blue"}
    turns = [ASKED[0], {**ASKED[1], "tool_calls": [{"name": "sky"}]}, found, found, *ASKED[2:]]
    rendered = render_conversation(turns, replace(base, chat_template=template), whole=False)
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        "<call>",
        "Fünf 🙂 Meter.<|im_end|>",
        "Two\nlines, ünd 日本.<|im_end|>",
    ]


LOOPS = {
    "by index": "{% for i in range(messages | length) %}{% set m = messages[i] %}BODY{% endfor %}",
    "by index, from the second": "{% set rest = messages[1:] %}{% set m = messages[0] %}BODY"
    "{% for i in range(rest | length) %}{% set m = rest[i] %}BODY{% endfor %}",
    "in a macro": "{% macro write(turns) %}{% for m in turns %}BODY{% endfor %}{% endmacro %}{{ write(messages) }}",
    "captured": "{% set all %}{% for m in messages %}BODY{% endfor %}{% endset %}{{ all | trim }}{{ '\n' }}",
    "left early": "{% for m in messages %}BODY{% if m.role == 'user' %}{% continue %}{% endif %}{% endfor %}",
    "in two parts": "{% for m in messages[:1] %}BODY{% endfor %}{% for m in messages[1:] %}BODY{% endfor %}",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_are_found_however_the_template_goes_through_the_messages(base: Tokenizer, loop: str) -> None:
    body = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = replace(base, chat_template=LOOPS[loop].replace("BODY", body) + prompt)
    example = encode_conversation(ASKED, tokenizer, index=0, whole=False)
    assert spans(example, tokenizer) == ["Fünf 🙂 Meter.<|im_end|>", "Two\nlines, ünd 日本.<|im_end|>"]


def test_text_may_contain_the_characters_of_marks(base: Tokenizer) -> None:
    odd = "\ufdd0\ufdd20:1\ufdd3\ufdd1 \ufdd5"
    turns = [{"role": "user", "content": odd}, {"role": "assistant", "content": f"yes {odd}"}]
    for template in (CHATML, MARKED):
        rendered = render_conversation(turns, replace(base, chat_template=template), whole=False)
        assert [rendered.text[start:end] for start, end in rendered.spans] == [f"yes {odd}<|im_end|>"]
        assert rendered.text.count(odd) == 2


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


def test_a_model_keeps_its_own_files_without_the_option(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    shutil.copytree(tiny_model, result)
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    opened(data, tiny_model).complete_result(result)
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
