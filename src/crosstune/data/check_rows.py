"""Check the rows of a local dataset without tokenizing them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.data.columns import Columns
from crosstune.data.dataset_list import parse_dataset, unweighted
from crosstune.data.encode import Encoder, check_any_answer, located
from crosstune.data.formats import has_empty_answer, to_conversation
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.sources import Source, open_source
from crosstune.data.tokenizer import Tokenizer
from crosstune.data.uniform import check_mapped, uniform_sources

MOST_BYTES = 64 << 20
"""Rows beyond this are checked by the training itself."""


@dataclass(frozen=True, kw_only=True)
class RowChecker:
    """Check rows as a training would read them.

    Without a tokenizer, rows are not rendered. `whole` skips locating the answers.
    """

    asked_format: str
    columns: Columns
    tokenizer: Tokenizer | None
    whole: bool

    def check(self, name: str, *, limit: int, training: bool = True) -> list[str]:
        """Raise a UserError for a row that does not fit the format or cannot be rendered; return what was not checked.

        At most `limit` rows of each source are read, all if it is -1. `training` is false for evaluation data.
        """
        entries = parse_dataset(name) if training else unweighted(name, option="eval_dataset")
        names = [entry.name for entry in entries]
        # Bundled rows are good, but the template of the model may refuse them.
        known = (DUMMY,) if self.tokenizer is not None else (*BUNDLED, DUMMY)
        local = [one for one in names if _is_here(one) and one not in known]
        sources = [open_source(one, needs_training=training) for one in local]
        if training and len(sources) == len(names):
            check_mapped(sources, self.columns)
        left: list[str] = []
        for source in sources:
            if not training and source.held_out:
                source = source.own_held_out()
            for uniform in uniform_sources(source, asked=self.asked_format, columns=self.columns):
                left += self._check(uniform, limit=limit)
        return left

    def _check(self, source: Source, *, limit: int) -> list[str]:
        encoder = None
        if self.tokenizer is not None:
            encoder = Encoder(tokenizer=self.tokenizer, form=source.form, whole=self.whole)
        num_rows = num_empty = 0
        for part, found, done_bytes in source.rows():
            if num_rows == limit:
                break
            if done_bytes > MOST_BYTES:
                return [f"the rows of {source.name} beyond the first {num_rows:,}"]
            num_rows += 1
            try:
                conversation = to_conversation(found.row, source.form)
                if has_empty_answer(conversation):
                    num_empty += 1
                elif encoder is not None:
                    encoder.render(conversation, found.row)
            except UserError as error:
                raise located(error, part, found.number) from error
        check_any_answer(source.name, source.form, num_rows=num_rows, num_empty=num_empty)
        return []


def is_here(name: str) -> bool:
    """Return whether all sources of a dataset can be opened without a download."""
    return all(_is_here(entry.name) for entry in parse_dataset(name))


def _is_here(name: str) -> bool:
    return name in BUNDLED or name == DUMMY or Path(name).expanduser().exists()
