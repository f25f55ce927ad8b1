"""Read a run's own rows and prompts, to check an export with the user's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstune.config.load import load_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.results.opened import Opened, read_samples
from crosstune.runs.open_recipe import open_recipe

_ROWS = 128
_TEXTS = 200
_TEXT_LENGTH = 4000
"""Characters of a row that are compared."""
_PROMPTS = 4
_PROMPT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """Tokenized rows of a run and texts from its evaluations; all empty for a target that is not a run."""

    train: list[list[int]] = field(default_factory=list)
    """The first training rows."""
    held_out: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Training rows as text, and the questions and answers of evaluations."""
    prompts: list[list[int]] = field(default_factory=list)
    """Prompts of the evaluations' samples, tokenized."""
    warnings: list[str] = field(default_factory=list)


def read_run_rows(opened: Opened, observer: Observer, *, required: str = "") -> RunRows:
    """Read a bounded number of rows. If the data cannot be read, return a warning, or raise a UserError if `required`, its
    first sentence, is set."""
    trained = opened.trained
    if not trained.is_run or trained.home is None:
        return RunRows()
    recipe: Any = None
    warnings = []
    try:
        config = load_config(file=trained.home / "config.yaml", environment={})
        recipe = open_recipe(config, opened.model, observer)
    except UserError as error:
        if required:
            raise UserError(required, why=error.why or error.message, do=error.do) from error
        warnings.append(
            f"the run's data cannot be read, so its rows are not part of the check: {error.message}"
        )
    corpus, held_out = getattr(recipe, "corpus", None), getattr(recipe, "held_out", None)
    held_out = getattr(held_out, "corpus", held_out)  # preferences
    train = _first(corpus)
    tokenizer = Tokenizer.from_folder(opened.tokenizer_folder, model=opened.model.path)
    samples = read_samples(trained)
    asked = list(dict.fromkeys(sample["prompt"] for sample in samples if sample.get("prompt")))
    texts = [tokenizer.decode(row, keep_special=True)[:_TEXT_LENGTH] for row in train]
    said = [value for sample in samples for value in sample.values() if isinstance(value, str) and value]
    return RunRows(
        train=train,
        held_out=_first(held_out),
        texts=[*dict.fromkeys(texts), *list(dict.fromkeys(said))[:_TEXTS]],
        prompts=_encode_prompts(asked, tokenizer, getattr(recipe, "questions", ())),
        warnings=warnings,
    )


def _first(corpus: Any) -> list[list[int]]:
    return (
        [] if corpus is None else [list(map(int, corpus[n].tokens)) for n in range(min(_ROWS, len(corpus)))]
    )


def _encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, questions: Sequence[Any]) -> list[list[int]]:
    """Return short prompts as they were asked in evaluations; without the held-out rows, as a user's turn."""
    known = {question.text: question.tokens for question in questions}
    prompts = []
    for text in texts:
        tokens = known.get(text) or encode_prompt([{"role": "user", "content": text}], tokenizer)
        if 0 < len(tokens) <= _PROMPT_TOKENS:
            prompts.append(list(map(int, tokens)))
        if len(prompts) == _PROMPTS:
            break
    return prompts
