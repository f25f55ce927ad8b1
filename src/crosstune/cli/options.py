"""`crosstune options`: list every option as help text or as the reference page of the docs."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.cli.arguments import Parser
from crosstune.config.table import help_text, markdown_table


def run(words: Sequence[str]) -> int:
    parser = Parser("options", description="List every option of train and plan.")
    parser.add_argument("--markdown", action="store_true", help="print the reference page docs/options.md")
    own = parser.parse_args(list(words))
    print(markdown_table() if own.markdown else help_text(), end="" if own.markdown else "\n")
    return 0
