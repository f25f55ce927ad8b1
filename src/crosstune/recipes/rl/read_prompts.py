"""Read the prompts of a configuration: training and held-out rows without leaks, with their other columns, tokenized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, shown
from crosstune.core.rewards import ScoredAnswer
from crosstune.data.prompt_rows import PromptRows, prompt_key, read_prompt_rows
from crosstune.data.read.files import Row
from crosstune.data.read.formats import SYSTEM_COLUMNS, Turn, as_messages, check_media, tools_of, turns_text
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.tokens.tokenizer import Tokenizer

ALIASES = ("question", "instruction", "problem", "query", "messages", "conversations")
"""Other names of the column `prompt`, tried in this order."""
TARGETS = ("prompt", "system", "tools")
"""The columns that --columns may map to."""
_SHAPE = "a row has a column prompt: text, or a list of messages; --columns maps another name, as in --columns task=prompt"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt with the other columns of its row, which the rewards read."""

    prompt: Sequence[Turn]
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False
    tools: Sequence[Any] | None = None
    place: str = field(default="", compare=False)
    """The file and line of the row."""
    tokens: Sequence[int] = field(default=(), compare=False)

    @property
    def text(self) -> str:
        return turns_text(self.prompt)

    def scored(self, answer: str) -> ScoredAnswer:
        return ScoredAnswer(prompt=self.prompt, answer=answer, columns=self.columns, is_text=self.is_text)


def is_conversation(text: str) -> bool:
    """Return True for a list of messages written as JSON, as in a CSV file."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in found)


def read_prompt(row: Row, *, place: str = "") -> Prompt:
    """Return the prompt of a row. Text becomes a message of the user; a conversation that ends with an answer loses it."""
    check_media(row)
    name = next((each for each in ("prompt", *ALIASES) if row.get(each) is not None), None)
    if name is None:
        null = next((each for each in ("prompt", *ALIASES) if each in row), None)
        why = f"its columns are {', '.join(map(str, row)) or 'none'}."
        why = f"its column {null} is null." if null is not None else why
        raise UserError("The row has no prompt.", why=why, do=_SHAPE)
    value = row[name]
    is_text = isinstance(value, str) and not is_conversation(value)
    if is_text:
        turns: list[Turn] = [{"role": "user", "content": value}] if value.strip() else []
    elif isinstance(value, (str, list)):
        turns = as_messages(value)
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
    else:
        raise UserError(f"The prompt is {shown(value)}.", do=_SHAPE)
    if not turns:
        raise UserError("The prompt is empty.", do=_SHAPE)
    system = next((row[each] for each in SYSTEM_COLUMNS if row.get(each)), None)
    if isinstance(system, str) and system.strip() and turns[0]["role"] not in ("system", "developer"):
        turns = [{"role": "system", "content": system}, *turns]
    columns = {key: found for key, found in row.items() if key not in (name, "tools")}
    return Prompt(prompt=turns, columns=columns, is_text=is_text, tools=tools_of(row), place=place)


def columns_of(prompts: Sequence[Prompt]) -> set[str]:
    return {name for one in prompts for name in one.columns}


def read_prompts(config: Config) -> PromptRows[Prompt]:
    """Read the prompts of --dataset and --eval_dataset."""
    data = read_prompt_rows(config, lambda row, place: [read_prompt(row, place=place)], targets=TARGETS)
    if not data.train:
        raise UserError(f"The dataset {config.dataset} has no prompt.", why="it has no row.", do=_SHAPE)
    return data


def tokenize(
    data: PromptRows[Prompt], tokenizer: Tokenizer, *, config: Config, model_limit: int | None
) -> PromptRows[Prompt]:
    """Tokenize the prompts. A prompt that leaves no room in the context for the longest answer is an error, or is dropped
    with --truncation drop."""
    context = min(config.context_length, model_limit or config.context_length)
    most = context - config.max_new_tokens
    if most < 1:
        raise UserError(
            f"Answers of {config.max_new_tokens} tokens do not fit into a context of {context} tokens.",
            do="lower --max_new_tokens"
            + (
                "" if context == model_limit else f", or raise --context_length above {config.max_new_tokens}"
            ),
        )

    def encode(found: Sequence[Prompt]) -> list[Prompt]:
        return [
            replace(one, tokens=tuple(encode_prompt(list(one.prompt), tokenizer, tools=one.tools)))
            for one in found
        ]

    train, held_out = encode(data.train), encode(data.held_out)
    long = [one for one in (*train, *held_out) if len(one.tokens) > most]
    if long and config.truncation != "drop":
        longest = max(long, key=lambda one: len(one.tokens))
        raise UserError(
            f"{len(long)} of {len(train) + len(held_out)} prompts leave no room for an answer of {config.max_new_tokens} "
            f"tokens in the context of {context}.",
            why=f"the longest, {longest.place}, has {len(longest.tokens)} tokens, and a prompt cannot be cut.",
            do="raise --context_length, lower --max_new_tokens, or leave them out with --truncation drop",
        )
    kept = [one for one in train if len(one.tokens) <= most]
    if not kept:
        raise UserError(
            f"No prompt of {config.dataset} leaves room for an answer of {config.max_new_tokens} tokens in the context of "
            f"{context}.",
            do="raise --context_length, or lower --max_new_tokens",
        )
    return replace(
        data,
        train=kept,
        held_out=[one for one in held_out if len(one.tokens) <= most],
        num_too_long=len(long),
    )


def identity_of(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the prompts and of the columns that rewards read."""
    sha = hashlib.sha256()
    for one in prompts:
        text = json.dumps([prompt_key(one), list(one.tokens), one.columns], sort_keys=True, default=str)
        sha.update(f"{len(text)} {text}".encode())
    return sha.hexdigest()
