"""The border between a prompt and its answer: white space, prompts without a header, and equal prompts in both splits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from crosstune.config.load import make_config
from crosstune.data.render.rendering import (
    encode_conversation,
    encode_prompt,
    prompt_mismatch,
    render,
    render_conversation,
)
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.sft import SftRecipe

PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content }}<|im_end|>\n"
    "{% else %}User: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"


def turns(question: str, answer: str, **flags: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **flags}]


def byte_level(*, trims: bool, alone: bool) -> RustTokenizer:
    """A tokenizer whose offsets may leave out the white space of a token."""
    found = RustTokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|im_end|>"], initial_alphabet=alphabet)
    found.train_from_iterator(
        [" Hello there\n\n\n\n", "Say:\n\n", "Say:\n  Hello", "User: Assistant:"] * 50, trainer
    )
    trim = processors.ByteLevel(trim_offsets=trims)
    found.post_processor = trim if alone else processors.Sequence([trim])
    return found


def make_tokenizer(folder: Path, rust: RustTokenizer, template: str) -> Tokenizer:
    return replace(
        Tokenizer.from_folder(folder), rust=rust, chat_template=template, special=("<|im_end|>",), bos_token=None,
        eos_token="<|im_end|>", stop_ids=frozenset([0]), adds_bos=False, num_rows=None, other_named=(),
    )  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
def test_white_space_that_begins_an_answer_carries_loss(tiny_model: Path, alone: bool) -> None:
    """After `Assistant:`, the model itself writes the space before 42, which is a token of its own."""
    trims, keeps = (
        make_tokenizer(tiny_model, byte_level(trims=trims, alone=alone), PLAIN) for trims in (True, False)
    )
    without_loss = 0
    for answer in ("42", "Hello", '"', "\n\n42", " "):
        made = [
            encode_conversation(turns("6 x 7?", answer), one, index=0, whole=False) for one in (trims, keeps)
        ]
        for example in made:
            first = int(example.supervised.argmax())
            assert example.tokens[:first].tolist() == encode_prompt(turns("6 x 7?", "")[:1], trims)
            learned = trims.decode(example.tokens[example.supervised].tolist(), keep_special=True)
            assert learned == f" {answer}<|im_end|>"
        assert made[0].tokens.tolist() == made[1].tokens.tolist()
        old = replace(trims, data_rules=3)
        before = encode_conversation(turns("6 x 7?", answer), old, index=0, whole=False)
        assert before.tokens.tolist() == made[0].tokens.tolist()
        without_loss += int(before.supervised.sum() < made[0].supervised.sum())
    assert without_loss, "the case does not occur"


def opened(model: Path, path: Path, **options: Any) -> SftRecipe:
    return SftRecipe(make_config(model_name=str(model), dataset=str(path), **options), model_folder=model)


@pytest.fixture
def bare_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model that continues text: nothing separates an answer from its prompt."""
    folder = tmp_path / "bare"
    shutil.copytree(tiny_model, folder)
    byte_level(trims=False, alone=True).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(BARE)
    return folder


def test_a_prompt_without_a_header_may_end_in_white_space(bare_model: Path, write_jsonl: Any) -> None:
    questions = ["Say:\n\n", "Say: ", "Say:\n\n\n\n", "Say:"]
    path = write_jsonl([{"prompt": asked, "completion": "Hello there"} for asked in questions])
    different = 0
    for rules in (4, 3):
        made = opened(bare_model, path, skip_eval=True, data_rules=rules)
        assert len(made.train) == len(questions)
        for example in made.train:
            prompt = encode_prompt(turns(questions[example.index], "")[:1], made.tokenizer)
            begins = example.tokens[: len(prompt)].tolist() == prompt
            assert begins or rules < 4
            different += not begins
    assert different, "the case does not occur"


def test_a_header_that_nothing_teaches_is_reported(tiny_model: Path) -> None:
    """The template writes a role before each answer, and has no generation prompt."""
    tokenizer = make_tokenizer(tiny_model, byte_level(trims=False, alone=True), PLAIN)
    assert prompt_mismatch(tokenizer) is None
    assert prompt_mismatch(replace(tokenizer, chat_template=BARE)) is None
    told = prompt_mismatch(replace(tokenizer, chat_template=PLAIN.replace("%}Assistant:{%", "%}{%")))
    assert told is not None and "Assistant" not in told[0] and "Assistant: Good" in told[1]


@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"packing": True}, {"eval_fraction": 0.3}])
def test_a_prompt_that_carries_loss_is_on_one_side_of_the_split(
    bare_model: Path, write_jsonl: Any, options: dict[str, Any]
) -> None:
    (bare_model / "chat_template.jinja").write_text(PLAIN)
    path = write_jsonl([{"prompt": f"q{row % 40}", "completion": f"a{row}"} for row in range(200)])
    leaks = 0
    for seed, rules in ((0, 4), (1, 4), (0, 3)):
        made = opened(bare_model, path, train_on_prompt=True, seed=seed, data_rules=rules, **options)
        assert made.held_out is not None and len(made.held_out) >= 15
        sides = [{row % 40 for row in one.rows().tolist()} for one in (made.train, made.held_out)]
        assert rules < 4 or not sides[0] & sides[1]
        leaks += bool(sides[0] & sides[1])
    assert leaks, "the case does not occur"


def test_templates_see_the_messages_of_the_data_alone(bare_model: Path, write_jsonl: Any) -> None:
    """A template that writes whole messages writes the same for a turn without loss."""
    source = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    (bare_model / "chat_template.jinja").write_text(source)
    rows = [{"messages": [*turns("q", "a", **flags), *turns("r", "b")]} for flags in ({"weight": 0}, {})]
    made = opened(bare_model, write_jsonl(rows), skip_eval=True)
    [text] = {made.tokenizer.decode(example.tokens.tolist()) for example in made.train}
    asked = [*turns("q", "a"), {"role": "user", "content": "r"}]
    assert text.startswith(render(asked, made.tokenizer, add_generation_prompt=True))


SWITCHED = (
    "{% set ns = namespace(off=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.off = '/no_think' in m.content %}User: {{ m.content }}\n{% else %}"
    "Say: {{ '<think></think>\n' if ns.off else '<think>\n' }}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Say: {{ '<think></think>\n' if ns.off else '<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["smollm3", "smollm3 unmarked", "user"])
def test_a_prompt_ends_where_the_switch_of_its_conversation_ends_it(tiny_model: Path, name: str) -> None:
    template = SWITCHED
    if name != "user":
        template = (Path(__file__).parents[1] / "chat_templates" / "smollm3.jinja").read_text()
    if name == "smollm3 unmarked":
        template = template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    tokenizer = make_tokenizer(tiny_model, byte_level(trims=True, alone=True), template)
    system = [] if name == "user" else [{"role": "system", "content": "/no_think"}]
    question = "Say: /no_think" if name == "user" else "Say:"
    joined = 0
    for answer in ("  Hello", "\n\n\nHello", "Hello"):
        asked = [*system, *turns(question, answer)]
        prompt = encode_prompt(asked[:-1], tokenizer)
        row = encode_conversation(asked, tokenizer, index=0, whole=False)
        assert row.tokens[: len(prompt)].tolist() == prompt and row.supervised[len(prompt) :].any()
        old = encode_conversation(asked, replace(tokenizer, data_rules=4), index=0, whole=False)
        joined += old.tokens[: len(prompt)].tolist() != prompt
    assert joined, "the case does not occur"


def test_a_conversation_whose_switch_closes_the_reasoning_does_not_lack_it(tiny_model: Path) -> None:
    template = SWITCHED.replace("'<think>\n' }}{{ m.content }}", "'' }}{{ m.content }}")
    tokenizer = make_tokenizer(tiny_model, byte_level(trims=True, alone=True), template)
    found = {
        (question, rules): render_conversation(
            turns(question, "Hello"), replace(tokenizer, data_rules=rules), whole=False
        ).lacks_reasoning
        for question in ("Say:", "Say: /no_think")
        for rules in (4, 5)
    }
    assert found == {
        ("Say:", 4): True,
        ("Say:", 5): True,
        ("Say: /no_think", 4): True,
        ("Say: /no_think", 5): False,
    }
