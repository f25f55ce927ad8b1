"""Training rows begin with the tokens of their prompts, and excluded turns carry no loss."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.render.rendering import encode_conversation, encode_prompt, prompt_mismatch, render
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.preference.open_pairs import tokenize
from crosstune.recipes.preference.read_pairs import read_preferences
from crosstune.recipes.sft import SftRecipe

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
HEADERS = {
    "space": "Assistant: ",
    "lines": "Assistant:\n\n",
    "quote": 'say="',
    "special": "<|im_start|>assistant\n",
}
ANSWERS = ["Hello there", "\nHello", "  Hello", '"Hello"', "1", "é"]
WORDS = [
    "Assistant: Hello there",
    "Assistant:\n\nHello",
    'say="Hello" =""Hello""',
    "User: 1 2 3",
    "\n\n\n Hello Hello",
]


def template(header: str, *, marked: bool = False) -> str:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + header + begin + "{{ m.content }}<|im_end|>" + end + "\n"
        "{% else %}User: {{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + header + "{% endif %}"
    )  # fmt: skip


def trained(kind: str) -> RustTokenizer:
    """A tokenizer whose tokens join the end of the header and the beginning of the answer."""
    if kind == "byte_level":
        found = RustTokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        found = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        found.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [*'▁\nabcdefghijklmnopqrstuvwxyzé0123456789AHUSs=":']
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    found.train_from_iterator(WORDS * 50, trainer)
    return found


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def tokenizer(request: Any, tiny_model: Path) -> Tokenizer:
    rust = trained(request.param)
    special = ("<unk>", "<|im_start|>", "<|im_end|>")
    end = rust.token_to_id("<|im_end|>")
    base = Tokenizer.from_folder(tiny_model)
    return replace(
        base, rust=rust, special=special, bos_token=None, eos_token="<|im_end|>",
        stop_ids=frozenset([end]), adds_bos=False, num_rows=None, other_named=(),
    )  # fmt: skip


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_row_begins_with_the_tokens_of_its_prompt(tokenizer: Tokenizer, header: str, marked: bool) -> None:
    tokenizer = replace(tokenizer, chat_template=template(header, marked=marked))
    joined = 0
    for answer in ANSWERS:
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
        prompt = encode_prompt(turns[:1], tokenizer)
        for whole in (False, True):
            example = encode_conversation(turns, tokenizer, index=0, whole=whole)
            old = encode_conversation(turns, replace(tokenizer, data_rules=1), index=0, whole=whole)
            assert example.tokens[: len(prompt)].tolist() == prompt
            assert tokenizer.decode(example.tokens.tolist(), keep_special=True) == tokenizer.decode(
                old.tokens.tolist(), keep_special=True
            )
            joined += old.tokens[: len(prompt)].tolist() != prompt
        answered = encode_conversation(turns, tokenizer, index=0, whole=False)
        assert not answered.supervised[: len(prompt)].any()
        learned = tokenizer.decode(answered.tokens[answered.supervised].tolist(), keep_special=True)
        assert learned.strip() == f"{answer.strip()}<|im_end|>"
    assert joined or header == HEADERS["special"], "the case does not occur"


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_the_answers_of_a_pair_begin_with_the_tokens_of_their_prompt(
    tokenizer: Tokenizer, header: str
) -> None:
    """Earlier answers in the prompt carry no loss, and begin a token as in generation."""
    tokenizer = replace(tokenizer, chat_template=template(header))
    turns = ["Hello", " Hi", "1 2"]
    prompt = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    rows = [
        {"prompt": asked, "chosen": answer, "rejected": "other"}
        for answer in ANSWERS
        for asked in ("Hello", prompt)
    ]
    pairs = [pair for row in rows for pair in read_preferences(row, paired=True)]
    config = make_config(recipe="preference", context_length=512)
    found = tokenize(pairs, tokenizer, config=config, name="pairs", model_limit=None)
    assert len(found) == len(rows)
    for place, pair in enumerate(pairs):
        asked = encode_prompt(list(pair.prompt), tokenizer)
        for example in found[place].examples:
            assert example.tokens[: len(asked)].tolist() == asked
            assert example.supervised[len(asked)] and not example.supervised[: len(asked)].any()


def test_every_answer_of_a_conversation_begins_a_token(tokenizer: Tokenizer) -> None:
    tokenizer = replace(tokenizer, chat_template=template(HEADERS["space"]))
    turns = [{"role": role, "content": "Hello there"} for role in ("user", "assistant", "user", "assistant")]
    example = encode_conversation(turns, tokenizer, index=0, whole=False)
    learned = example.tokens[example.supervised].tolist()
    half = learned[: len(learned) // 2]
    assert learned == half * 2
    first = len(encode_prompt(turns[:1], tokenizer))
    assert example.tokens[first : first + len(half)].tolist() == half


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("macro", [False, True])
def test_a_row_begins_with_the_tokens_of_every_prompt(tokenizer: Tokenizer, header: str, macro: bool) -> None:
    """A prompt has its earlier answers as the row has them, and as the model wrote them."""
    source = template(header)
    if macro:  # the loops cannot be marked
        loop, _, prompt = source.partition("{% if add_gen")
        source = "{% macro all() %}" + loop + "{% endmacro %}{{ all() }}{% if add_gen" + prompt
    tokenizer = replace(tokenizer, chat_template=source)
    different = 0
    for answers in zip(ANSWERS, ANSWERS[1:], ANSWERS[2:], strict=False):
        turns = [
            {"role": role, "content": text}
            for answer in answers
            for role, text in (("user", "Hello"), ("assistant", answer))
        ]
        row = encode_conversation(turns, tokenizer, index=0, whole=False).tokens.tolist()
        for asked in (turns[:1], turns[:3], turns[:5]):
            prompt = encode_prompt(asked, tokenizer)
            assert row[: len(prompt)] == prompt
            different += prompt != tokenizer.encode(render(asked, tokenizer, add_generation_prompt=True)).ids
    assert different or header == HEADERS["special"], "the case does not occur"


@pytest.mark.parametrize("answer", [" one", "\n\n one", "one", "one \n", " "])
@pytest.mark.parametrize("side", ["rstrip", "lstrip"])
@pytest.mark.parametrize("marked", [False, True])
def test_a_token_that_strips_white_space_is_not_part_of_the_answer_beside_it(
    tokenizer: Tokenizer, answer: str, side: str, marked: bool
) -> None:
    """`<|assistant|>` of Phi-3 takes in the white space at the beginning of an answer."""
    rust = RustTokenizer.from_str(tokenizer.rust.to_str())
    rust.add_special_tokens([AddedToken(f"<|{role}|>", **{side: True}) for role in ("user", "assistant")])
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    source = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" + begin + "{{ m.content }}" + end +
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )  # fmt: skip
    tokenizer = replace(tokenizer, rust=rust, chat_template=source)
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": answer if role == "assistant" else "Hello"} for role in roles]
    example = encode_conversation(turns, tokenizer, index=0, whole=False)
    learned = tokenizer.decode(example.tokens[example.supervised].tolist(), keep_special=True)
    assert "".join(learned.split()) == answer.strip() * 2
    first = len(encode_prompt(turns[:1], tokenizer))
    assert not example.supervised[:first].any()
    old = encode_conversation(turns, replace(tokenizer, data_rules=2), index=0, whole=False)
    assert old.tokens.tolist() == example.tokens.tolist(), "only the mask depends on this rule"
    assert (old.supervised >= example.supervised).all()


@pytest.fixture
def spaced_model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "spaced"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(template("Answer: "))
    return folder


def opened(model: Path, path: Path, **options: Any) -> SftRecipe:
    config = make_config(model_name=str(model), dataset=str(path), skip_eval=True, **options)
    return SftRecipe(config, model_folder=model)


def test_rows_of_a_run_begin_with_their_prompts(spaced_model: Path, write_jsonl: Any) -> None:
    path = write_jsonl([{"prompt": f"What {n}?", "completion": f"the {n}"} for n in range(5)])
    made = opened(spaced_model, path)
    for example in made.train:
        prompt = encode_prompt([{"role": "user", "content": f"What {example.index}?"}], made.tokenizer)
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert int(example.supervised.argmax()) == len(prompt)
    before = opened(spaced_model, path, data_rules=1)
    assert before.identity() != made.identity(), "the template does not join tokens"
    assert before.data.identity() != made.data.identity()


def test_a_prompt_that_rows_do_not_contain_is_reported(spaced_model: Path, write_jsonl: Any) -> None:
    file = spaced_model / "chat_template.jinja"
    path = write_jsonl([{"prompt": "a", "completion": "b"}])
    assert "warnings" not in opened(spaced_model, path).describe()
    file.write_text(template("Answer: ") + "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}")
    [told] = [line for line in opened(spaced_model, path).describe()["warnings"] if "prompts with" in line]
    assert "Answer: \\n'" in told
    assert "Answer: Good" in told


def test_a_prompt_that_skips_the_reasoning_which_rows_lack_is_reported(tokenizer: Tokenizer) -> None:
    skipping = template("Answer: ") + "{% if add_generation_prompt %}<think>\n\n</think>{% endif %}"
    told = prompt_mismatch(replace(tokenizer, chat_template=skipping))
    assert told is not None and "</think>" in told[0]


@pytest.mark.parametrize("name", ["deepseek_r1", "nemotron3_nano", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"train_on_prompt": True}])
def test_rows_without_the_reasoning_that_the_prompt_opens_are_counted(
    spaced_model: Path, write_jsonl: Any, name: str, options: dict[str, Any]
) -> None:
    (spaced_model / "chat_template.jinja").write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
    told = []
    for thoughts in ({}, {"reasoning_content": "Say a."}):
        path = write_jsonl([conversation({}, thoughts), conversation(thoughts)])
        made = opened(spaced_model, path, **options).describe()
        told.append(made["train"]["without_reasoning"])
        assert any("no reasoning" in line for line in made.get("warnings", ())) == bool(told[-1])
    # DeepSeek-R1 removes reasoning from all answers; the prompt of Qwen3 does not open it.
    assert told == {"deepseek_r1": [2, 2], "nemotron3_nano": [2, 0], "qwen3": [0, 0]}[name]


@pytest.mark.parametrize("file", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_in_use_write_their_prompts(tokenizer: Tokenizer, file: Path) -> None:
    assert prompt_mismatch(replace(tokenizer, chat_template=file.read_text(encoding="utf-8"))) is None


def conversation(*flags: dict[str, Any]) -> dict[str, Any]:
    turns = []
    for number, flag in enumerate(flags):
        turns += [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": f"a{number}"} | flag,
        ]
    return {"messages": turns}


def learned(made: SftRecipe, place: int = 0) -> str:
    example = made.train[place]
    return made.tokenizer.decode(example.tokens[example.supervised].tolist())


@pytest.mark.parametrize(
    ("out", "kept"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"train": False}, {"train": True}),
        ({"training": False}, {}),
        ({"masked": True}, {"masked": False}),
        ({"mask": True}, {"mask": None}),
        ({"weight": "0"}, {"weight": "1.0"}),
        ({"train": "False"}, {"train": "true"}),
        ({"mask": "yes"}, {"mask": ""}),
    ],
)
def test_excluded_turns_carry_no_loss(
    tiny_model: Path, write_jsonl: Any, out: dict[str, Any], kept: dict[str, Any]
) -> None:
    path = write_jsonl([conversation(out, kept), conversation(kept, out), conversation(out, out)])
    made = opened(tiny_model, path)
    assert ["a1" in learned(made, 0), "a0" in learned(made, 0)] == [True, False]
    assert ["a1" in learned(made, 1), "a0" in learned(made, 1)] == [False, True]
    described = made.describe()
    assert described["train"]["without_answer"] == 1, "no turn of the third row carries loss"
    assert described["train"]["unused_columns"] == []
    whole = opened(tiny_model, path, train_on_prompt=True)
    assert ["a1" in learned(whole, 0), "a0" in learned(whole, 0)] == [True, False]
    assert "q0" in learned(whole, 0)


def test_a_weight_between_is_an_error_and_other_keys_are_reported(tiny_model: Path, write_jsonl: Any) -> None:
    for weight in (0.5, "0.5", "none"):
        with pytest.raises(UserError, match=r"line 1: A message has the weight \"?(0\.5|none)"):
            opened(tiny_model, write_jsonl([conversation({"weight": weight})]))
    row = conversation({"time": "noon", "mask": [1, 0], "id": ""})
    for written in (row, {"messages": json.dumps(row["messages"])}):
        made = opened(tiny_model, write_jsonl([written]))
        assert made.describe()["train"]["unused_columns"] == ["messages.mask", "messages.time"]


def test_nothing_to_learn_is_an_error(tiny_model: Path, write_jsonl: Any) -> None:
    with pytest.raises(UserError, match="nothing to learn"):
        opened(tiny_model, write_jsonl([conversation({"weight": 0})] * 3))


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index > 2 %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_without_text_may_still_be_learned(spaced_model: Path, write_jsonl: Any) -> None:
    """It is part of the prompt, or it has reasoning that the template writes in this turn."""
    (spaced_model / "chat_template.jinja").write_text(THINKS)
    thought = {"content": "", "reasoning": "why"}
    rows = [
        conversation({"content": "", "weight": 0}, {}),
        conversation({}, thought),
        conversation({"content": ""}, {}),
        conversation(thought, {}),  # not rendered in the first turns
        conversation(thought, thought),
        {"prompt": [*conversation({"content": ""})["messages"], {"role": "user", "content": "q"}], "completion": "a1"},
    ]  # fmt: skip
    made = opened(spaced_model, write_jsonl(rows[:5]))
    assert [example.index for example in made.train] == [0, 1]
    assert [learned(made, place) for place in (0, 1)] == ["a1", "a0<think>why</think>"]
    assert made.describe()["train"]["empty_answers"] == 3
    assert learned(opened(spaced_model, write_jsonl(rows[5:]))) == "a1"
    with pytest.raises(UserError, match="All 5 rows"):
        opened(spaced_model, write_jsonl(rows[:5]), data_rules=2)


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.content and SHOWN %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% generation %}CALL {{ call.function.name }}{% endgeneration %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("shown", "kept"), [("true", "a1"), ("not loop.last", "")])
def test_marks_belong_to_the_turn_that_writes_them(
    spaced_model: Path, write_jsonl: Any, shown: str, kept: str
) -> None:
    (spaced_model / "chat_template.jinja").write_text(CALLS.replace("SHOWN", shown))
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    row = conversation({"tool_calls": calls, "weight": 0}, {})
    turned = conversation({"tool_calls": calls}, {"weight": 0})
    history = {"prompt": conversation({"tool_calls": calls})["messages"], "completion": "a1"}
    history["prompt"].append({"role": "user", "content": "q1"})
    made = opened(
        spaced_model, write_jsonl([row, turned, {"messages": row["messages"][:2]}][1 - bool(kept) :])
    )
    assert [learned(made, place) for place in range(len(made.train))] == [*[kept] * bool(kept), "a0CALL look"]
    if kept:
        assert learned(opened(spaced_model, write_jsonl([history]))) == "a1"


def test_a_tokenizer_that_is_opened_again_is_parsed_again_only_if_it_changed(tmp_path: Path) -> None:
    trained("byte_level").save(str(tmp_path / "tokenizer.json"))
    first = Tokenizer.from_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path).rust is first.rust
    trained("metaspace").save(str(tmp_path / "tokenizer.json"))
    changed = Tokenizer.from_folder(tmp_path)
    assert changed.rust is not first.rust and changed.digest != first.digest
