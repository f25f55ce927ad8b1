"""What should be known about the data before the machine is busy with it for hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.chat import encode_conversation
from crosstune.data.corpus import Corpus
from crosstune.data.named_datasets import DUMMY
from crosstune.data.tokenizer import Tokenizer

# Below this share of supervised tokens most of the work goes into prompts that teach nothing.
LOW_SUPERVISED_SHARE = 0.01


def leave_out_unsupervised(corpus: Corpus, *, source: str) -> tuple[Corpus, int]:
    """A row without a supervised token teaches nothing and would make a step of nothing."""
    taught = np.flatnonzero(corpus.num_supervised > 0)
    if not len(taught):
        raise UserError(
            f"No token of {source} is supervised: there is nothing to learn.",
            why="no row has an answer of the assistant within the context.",
            do="check the roles of the messages, raise --context_length, or pass --train_on_prompt",
        )
    return corpus.part(taught), len(corpus) - len(taught)


def num_shared(train: Corpus, held_out: Corpus) -> int:
    """Held-out examples that are in the training data too, and so measure memory."""
    return int(np.isin(held_out.hashes(), train.hashes()).sum())


def format_warnings(config: Config, tokenizer: Tokenizer, *, form: str) -> Sequence[str]:
    """What the model's tokenizer lacks for such data, and what was asked that such data has no use for."""
    if form == DUMMY:
        return []
    plain = form == "text"
    rows = (
        (
            not plain and not tokenizer.chat_template,
            "this model has no chat template: turns are written as `User: ...` and `Assistant: ...` on lines of their own, "
            "and the template for that is saved beside the result",
        ),
        (
            not tokenizer.eos_token and (plain or not tokenizer.chat_template),
            f"this model has no end token: nothing teaches it where {'a text' if plain else 'an answer'} ends",
        ),
        (
            bool(last := "" if plain else _unending(tokenizer)),
            f"the chat template ends an answer with {last!r}, which is no end token of this model: it learns to go on",
        ),
        (plain and config.train_on_prompt, "train_on_prompt has no effect: a plain text has no prompt"),
        (
            plain and config.eval_metric == "exact_match",
            "eval_metric exact_match has no effect: a plain text has no answer to compare with",
        ),
    )
    return [f"{sentence}." for holds, sentence in rows if holds]


def _unending(tokenizer: Tokenizer) -> str:
    """The last token of an answer, where the model does not stop at it."""
    if not tokenizer.chat_template:
        return ""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]
    try:
        example = encode_conversation(turns, tokenizer, index=0, whole=False)
    except UserError:  # a template for other turns than these; the data's own rows tell what it takes
        return ""
    learned = example.tokens[example.supervised]
    if not len(learned) or int(learned[-1]) in tokenizer.stop_ids:
        return ""
    return tokenizer.decode([int(learned[-1])], keep_special=True)


def warnings_of(train: dict[str, Any], *, num_shared: int) -> Sequence[str]:
    """What someone should look at before the machine is busy for hours."""
    examples = train["examples"]
    rows = (
        (train["empty_answers"], f"{train['empty_answers']:,} rows have an empty answer and are left out"),
        (
            train["without_answer"],
            f"{train['without_answer']:,} rows have no answer within the context and are left out",
        ),
        (
            train["unlocated_answers"],
            f"{train['unlocated_answers']:,} answers are changed by the chat template so much that they cannot be "
            "located; they carry no loss",
        ),
        (
            train["cut_examples"],
            f"{train['cut_examples']:,} of {examples:,} examples are cut, by {train['cut_tokens']:,} tokens in all",
        ),
        (
            train["dropped_examples"],
            f"{train['dropped_examples']:,} examples are longer than the context and are left out",
        ),
        (
            train["duplicates"],
            f"{train['duplicates']:,} of {examples:,} examples are copies of another one",
        ),
        (
            train["unused_columns"],
            f"columns that are not read: {', '.join(train['unused_columns'])}",
        ),
        (
            train["ignored_by_template"],
            f"the chat template of this model leaves out {', '.join(train['ignored_by_template'])}: nothing is learned "
            "from it",
        ),
        (num_shared, f"{num_shared:,} held-out examples are also in the training data"),
        (
            train["supervised_share"] < LOW_SUPERVISED_SHARE,
            f"only {train['supervised_share']:.2%} of the tokens are supervised",
        ),
    )
    return [f"{sentence}." for holds, sentence in rows if holds]
