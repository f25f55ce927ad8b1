"""Check the data before training, warn about likely mistakes, and summarize the data for the page of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.read.columns import Columns, check_columns, split_by_format
from crosstune.data.read.dataset_list import parse_dataset, unweighted
from crosstune.data.read.formats import has_empty_answer, to_conversation
from crosstune.data.read.sources import Source, folder_of, open_source, row_error
from crosstune.data.render.rendering import encode_conversation, prompt_mismatch
from crosstune.data.tokens.corpus import Corpus
from crosstune.data.tokens.encode import Encoder, check_any_answer
from crosstune.data.tokens.tokenizer import Tokenizer

LOW_SUPERVISED_SHARE = 0.01
"""Below this fraction of supervised tokens, most of the compute is spent on prompts."""
MAX_BYTES = 64 << 20
"""Rows beyond this are not checked before training reads them."""
# Special tokens in a template: <|im_start|>, <end_of_turn>, [INST].
_MARK = re.compile(r"<\|\w+\|>|<\w+>|\[/?[A-Z_]+\]")


def drop_unsupervised(corpus: Corpus, *, source: str) -> tuple[Corpus, int]:
    """Return the rows with a supervised token, and the number of rows without one."""
    supervised = np.flatnonzero(corpus.num_supervised > 0)
    if not len(supervised):
        raise UserError(
            f"No token of {source} is supervised: there is nothing to learn.",
            why="no row has an assistant answer with loss within the context.",
            do="check the roles and weights of the messages, raise --context_length, or pass --train_on_prompt",
        )
    return corpus.part(supervised), len(corpus) - len(supervised)


def num_shared(train: Corpus, held_out: Corpus) -> int:
    """Return the number of held-out examples that are also in the training data."""
    return int(np.isin(held_out.hashes(shown=True), train.hashes(shown=True)).sum())


def format_warnings(config: Config, tokenizer: Tokenizer, *, form: str) -> Sequence[str]:
    """Return warnings about tokens that the tokenizer lacks for this format, and about options without effect."""
    if form == DUMMY:
        return []
    plain = form == "text"
    rows = (
        (
            not plain and not tokenizer.chat_template,
            "this model lacks a chat template: turns are written as lines `User: ...` and `Assistant: ...`, "
            "and the template for this is saved with the result",
        ),
        (
            not tokenizer.eos_token and (plain or not tokenizer.chat_template),
            f"this model has no end token: nothing teaches it where {'a document' if plain else 'an answer'} ends",
        ),
        (
            bool(missing := [] if plain or not config.chat_template else _missing_tokens(tokenizer)),
            f"the chat template writes {', '.join(missing)}, which are not in this model's vocabulary: they are learned as "
            "ordinary text, and may not end an answer",
        ),
        (
            bool(last := "" if plain or missing else _unending(tokenizer)),
            f"the chat template ends an answer with {last!r}, which is not an end token of this model: it will not stop",
        ),
        (
            bool(unlike := None if plain else prompt_mismatch(tokenizer)),
            "the chat template prompts with {!r}, but training rows have {!r}: write the same before an answer as in the "
            "generation prompt".format(*(unlike or ("", ""))),
        ),
        (plain and config.train_on_prompt, "train_on_prompt has no effect: plain text has no prompt"),
        (
            plain and config.eval_metric == "exact_match",
            "eval_metric exact_match has no effect: plain text has no answer to compare with",
        ),
    )
    return [f"{sentence}." for holds, sentence in rows if holds]


def _unending(tokenizer: Tokenizer) -> str:
    """Return the last token of an answer if the model does not stop at it, otherwise an empty string."""
    last = _last_token(tokenizer)
    if last is None or last in tokenizer.stop_ids:
        return ""
    return tokenizer.decode([last], keep_special=True)


def _missing_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens in the chat template that the tokenizer does not have."""
    marks = dict.fromkeys(_MARK.findall(tokenizer.chat_template or ""))
    return [mark for mark in marks if tokenizer.rust.token_to_id(mark) is None]


def stop_at_template_end(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that also stops at the special token with which its template ends an answer."""
    last = _last_token(tokenizer)
    if last is None or tokenizer.decode([last], keep_special=True) not in tokenizer.special:
        return tokenizer
    return replace(tokenizer, stop_ids=tokenizer.stop_ids | {last})


def _last_token(tokenizer: Tokenizer) -> int | None:
    """Return the last supervised token of an answer; None if unknown."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]
    try:
        example = encode_conversation(turns, tokenizer, index=0, whole=False)
    except UserError:  # the template expects different turns; the data rows report their own errors
        return None
    learned = example.tokens[example.supervised]
    return int(learned[-1]) if len(learned) else None


_WARNINGS = {
    "empty_answers": "{empty_answers:,} rows have an empty answer and are skipped",
    "without_answer": "{without_answer:,} rows have no answer within the context and are skipped",
    "unlocated_answers": "{unlocated_answers:,} answers cannot be located because the chat template changes them; "
    "they carry no loss",
    "without_reasoning": "{without_reasoning:,} rows have no reasoning, but the generation prompt of the chat template opens it: the "
    "model is not trained to answer its own prompt; add `reasoning_content` to the answers if the template renders it, or pass "
    "a --chat_template whose generation prompt does not open the reasoning",
    "cut_examples": "{cut_examples:,} of {examples:,} examples are cut, by {cut_tokens:,} tokens in total",
    "dropped_examples": "{dropped_examples:,} examples are longer than the context and are skipped",
    "bad_rows": "{bad_rows:,} rows cannot be read; --skip_bad_rows leaves them out",
    "duplicates": "{duplicates:,} of {examples:,} examples are duplicates{dedup}",
    "unused_columns": "columns that are not read: {unused_columns}",
    "ignored_by_template": "this model's chat template ignores {ignored_by_template}: nothing is learned from it",
    "joined_tokens": "the end of the prompt and the beginning of an answer form tokens that generation cannot produce after the "
    "prompt ({joined_tokens}): end the generation prompt of the chat template without whitespace",
    "num_shared": "{num_shared:,} held-out examples are also in the training data; --dedup drops them from training",
}


def warnings_of(train: dict[str, Any], *, num_shared: int | None = None) -> Sequence[str]:
    """Return warnings based on the statistics of the training data. Without `num_shared`, --dedup has no effect."""
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in train.items()}
    shown |= {"num_shared": num_shared, "dedup": "; --dedup drops them" if num_shared is not None else ""}
    found = [f"{sentence.format_map(shown)}." for name, sentence in _WARNINGS.items() if shown[name]]
    if train["supervised_share"] < LOW_SUPERVISED_SHARE:
        found.append(f"only {train['supervised_share']:.2%} of the tokens are supervised.")
    return found


@dataclass(frozen=True, kw_only=True)
class RowChecker:
    """Check rows as a run would read them. Without a tokenizer, rows are not rendered; `whole` skips locating answers."""

    asked_format: str
    columns: Columns
    tokenizer: Tokenizer | None
    whole: bool
    skips_bad: bool = False

    def check(self, name: str, *, limit: int, training: bool = True) -> list[str]:
        """Raise a UserError for a row that does not match the format or cannot be rendered; return the skipped checks.
        At most `limit` rows of each source are read, all if it is -1. `training` is false for evaluation data."""
        entries = parse_dataset(name) if training else unweighted(name, option="eval_dataset")
        names = [entry.name for entry in entries]
        # Bundled rows are valid, but the model's template may reject them.
        known = (DUMMY,) if self.tokenizer is not None else (*BUNDLED, DUMMY)
        local = [one for one in names if _is_local(one) and one not in known]
        sources = [open_source(one, needs_training=training) for one in local]
        if training and len(sources) == len(names):
            check_columns(sources, self.columns)
        left: list[str] = []
        for source in sources:
            if not training and source.held_out:
                source = source.own_held_out()
            source = replace(source, skips_bad=self.skips_bad)
            for uniform in split_by_format(source, asked=self.asked_format, columns=self.columns):
                left += self._check(uniform, limit=limit)
        return left

    def _check(self, source: Source, *, limit: int) -> list[str]:
        encoder = None
        if self.tokenizer is not None:
            encoder = Encoder(tokenizer=self.tokenizer, form=source.form, whole=self.whole)
        num_rows = num_empty = num_bad = 0
        for part, found, done_bytes in source.rows():
            if num_rows == limit:
                break
            if done_bytes > MAX_BYTES:
                return [f"the rows of {source.name} beyond the first {num_rows:,}"]
            num_rows += 1
            if found.error is not None:
                num_bad += 1
                continue
            try:
                if encoder is None:
                    num_empty += has_empty_answer(to_conversation(found.row, source.form, no_pictures=""))
                    continue
                conversation, _ = encoder.read(found.row, folder_of(part), decode=False)
                if encoder.has_empty_answer(conversation, found.row):
                    num_empty += 1
                else:
                    encoder.render(conversation, found.row)
            except UserError as error:
                if not self.skips_bad:
                    raise row_error(error, part, found.number) from error
                num_bad += 1
        check_any_answer(source.name, source.form, num_rows=num_rows - num_bad, num_empty=num_empty)
        return []


def is_local_dataset(name: str) -> bool:
    """Return True if all sources of a dataset can be opened without a download."""
    return all(_is_local(entry.name) for entry in parse_dataset(name))


def _is_local(name: str) -> bool:
    return name in BUNDLED or name == DUMMY or Path(name).expanduser().exists()


MAX_BINS = 24
MAX_CHARACTERS = 4000
"""Maximum characters of the example; the middle of longer examples is omitted."""


def summarize_corpus(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the lengths and an example of a corpus, for plan.json and the page of a run."""
    if not len(corpus):
        return {}
    lengths = corpus.lengths()
    typical = int(np.abs(lengths - int(np.median(lengths))).argmin())
    example = corpus[typical]
    pieces = marked_pieces(example, tokenizer)
    return {
        "lengths": length_histogram(lengths),
        "example": {
            "row": int(example.index) + 1,
            "tokens": len(example.tokens),
            "pieces": [{"text": text, "supervised": counts} for text, counts in cut_middle(pieces)],
        },
    }


def length_histogram(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """Return the number of examples in bins of equal, round width: bin i counts the lengths from first + i * width on."""
    low, high = int(lengths.min()), int(lengths.max())
    width = _round_width((high - low + 1) / MAX_BINS)
    first = low // width * width
    counts = np.bincount((lengths - first) // width)
    return {"first": first, "width": width, "counts": counts.tolist()}


def _round_width(rough: float) -> int:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10 ** max(0, math.floor(math.log10(rough))) if rough >= 1 else 1
    return next(size * power for size in (1, 2, 5, 10) if size * power >= rough)


def marked_pieces(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text of an example in pieces: (text, supervised)."""
    pieces: list[tuple[str, bool]] = []
    marks, start = example.supervised, 0
    for place in range(1, len(marks) + 1):
        if place == len(marks) or marks[place] != marks[start]:
            text = tokenizer.decode(example.tokens[start:place].tolist(), keep_special=True)
            pieces.append((text, bool(marks[start])))
            start = place
    return pieces


def cut_middle(pieces: list[tuple[str, bool]], *, limit: int = MAX_CHARACTERS) -> list[tuple[str, bool]]:
    """Omit the middle of an example that is too long to be shown."""
    total, half = sum(len(text) for text, _ in pieces), limit // 2
    if total <= limit:
        return pieces
    head, tail, start = [], [], 0
    for text, supervised in pieces:
        head.append((text[: max(0, half - start)], supervised))
        tail.append((text[max(0, total - half - start) :], supervised))
        start += len(text)
    middle = (f" … [{total - limit:,} more characters] … ", False)
    return [piece for piece in (*head, middle, *tail) if piece[0]]
