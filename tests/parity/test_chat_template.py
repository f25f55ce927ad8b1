"""Chat templates: the same text as from transformers, and loss where `{% generation %}` marks put it."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_template_cases import CASES, CONVERSATIONS, SPECIAL, TOOLS, marked_source, plain_source
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.render.answer_spans import DAY
from crosstune.data.render.encoding import mask_of
from crosstune.data.render.rendering import render, render_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.sft import SftRecipe


class _SameDay:
    """The clock that `strftime_now` reads in transformers."""

    @staticmethod
    def now() -> Any:
        return DAY


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> Tokenizer:
    made = Tokenizer.from_folder(tiny_model)
    made = replace(made, rust=deepcopy(made.rust))
    made.rust.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return replace(
        made,
        bos_token="<s>",
        eos_token="</s>",
        special=(*made.special, *SPECIAL),
        other_named=(),
        num_rows=None,
    )


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    """The template. pytest runs all tests of one before the next, so each is loaded once."""
    return str(request.param)


def ours(base: Tokenizer, name: str) -> Tokenizer:
    stops = frozenset(base.rust.token_to_id(text) for text in ("</s>", *CASES[name].stops))
    return replace(base, chat_template=plain_source(name), stop_ids=stops)


def reference(told: str, *, source: str, tools: Any, add_generation_prompt: bool = False) -> str | None:
    """Return the text from transformers; None when the template refuses the conversation."""
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [CONVERSATIONS[told]],
            tools=tools,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
    except TemplateError:
        return None
    return str(texts[0])


def test_templates_see_what_transformers_shows_them(
    base: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _SameDay)
    tokenizer, source = ours(base, name), plain_source(name)
    num_equal = 0
    for told, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for asks in (False, True):
                text = reference(told, source=source, tools=tools, add_generation_prompt=asks)
                if text is None:
                    with pytest.raises(UserError):
                        render(messages, tokenizer, add_generation_prompt=asks, tools=tools)
                    continue
                assert render(messages, tokenizer, add_generation_prompt=asks, tools=tools) == text, told
                num_equal += 1
    assert num_equal >= 24


def marked_spans(name: str, told: str, tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text and the marked spans from transformers, without what the case says is in the marks besides."""
    case = CASES[name]
    chat = chat_template_utils._alias_reasoning_fields(CONVERSATIONS[told])
    text, spans = chat_template_utils._render_with_assistant_indices(
        chat_template_utils._compile_jinja_template(marked_source(name)),
        chat,
        tools,
        None,
        False,
        bos_token="<s>",
        eos_token="</s>",
    )
    found: list[tuple[int, int]] = []
    for start, end in spans:
        header = next((header for header in case.headers if text.startswith(header, start)), "")
        if found and found[-1][1] == start and not header:  # more of the same answer
            start = found.pop()[0]
        found.append((start + len(header), end))
    return text, [
        (start, end - len(case.tail)) if text[start:end].endswith(case.tail) else (start, end)
        for start, end in found
        if end > start
    ]


def trained(text: str, spans: Any) -> list[tuple[int, str]]:
    """Return the stretches of text with loss, and where they are."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        joined.append((joined.pop()[0] if joined and joined[-1][1] == start else start, end))
    return [(start, text[start:end]) for start, end in joined]


def test_the_loss_is_where_the_marks_are(base: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _SameDay)
    tokenizer = ours(base, name)
    num_equal = 0
    for told, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            if reference(told, source=marked_source(name), tools=tools) is None:
                continue
            text, spans = marked_spans(name, told, tools)
            found = render_conversation(messages, tokenizer, whole=False, tools=tools)
            assert found.text == text, told
            assert trained(text, found.spans) == trained(text, spans), told
            num_equal += 1
    assert num_equal >= 10


def test_the_masks_are_those_of_transformers(
    base: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By token, where the marks have nothing besides what is trained."""
    monkeypatch.setattr(chat_template_utils, "datetime", _SameDay)
    if CASES[name].headers or CASES[name].tail or CASES[name].stops:
        return
    reader = PreTrainedTokenizerFast(tokenizer_object=base.rust, bos_token="<s>", eos_token="</s>")
    messages = CONVERSATIONS["one turn"] + CONVERSATIONS["the answer is the question"]
    marked = reader.apply_chat_template(
        messages, chat_template=marked_source(name), return_dict=True, return_assistant_tokens_mask=True
    )
    tokenizer = ours(base, name)
    rendered = render_conversation(messages, tokenizer, whole=False)
    encoding = tokenizer.encode(rendered.text)
    assert encoding.ids == marked["input_ids"]
    assert (
        np.flatnonzero(mask_of(encoding, rendered)).tolist()
        == np.flatnonzero(marked["assistant_masks"]).tolist()
    )


def test_transformers_renders_the_template_as_it_was_trained(
    tiny_model: Path, write_jsonl: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    row = {"prompt": "Is it warm?", "completion": "It is."}
    asked = make_config(dataset=str(write_jsonl([row])), skip_eval=True)
    recipe = SftRecipe(asked, model_folder=folder)
    recipe.complete_result(folder)
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
    assert theirs == recipe.tokenizer.decode(recipe.train[0].tokens, keep_special=True)
