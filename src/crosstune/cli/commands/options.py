"""`crosstune options`: list every option, explain one, or print the reference page of the docs."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.cli.arguments import Parser, print_json, print_result
from crosstune.config.option_names import suggestions
from crosstune.config.peer_names import DIFFERENT, SAME, SAME_FOR_VALUES
from crosstune.config.schema import option_list, options_by_name
from crosstune.config.table import describe_option, description_lines, help_text, markdown_table
from crosstune.core.errors import EXIT_DONE, UserError, shown

EXAMPLES = """examples:
  crosstune options                    every option
  crosstune options lora_rank          one option in full
  crosstune options lora               the options with lora in their name
  crosstune options load_in_4bit       the equivalent of another trainer's option"""


def make_parser() -> Parser:
    parser = Parser(
        "options", description="List the options of train and plan, or explain one.", epilog=EXAMPLES
    )
    parser.add_argument("name", nargs="?", help="an option, or part of a name")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/reference/options.md")
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    flags = [action for known in parser._actions for action in known.option_strings]
    # Accept --lora_rank for lora_rank.
    own = parser.parse_args([word if word in flags else word.lstrip("-") for word in words])
    if own.json and own.name is None:
        parser.error("--json needs the name of an option")
    if own.markdown:
        print(markdown_table(), end="")
    elif own.name is None:
        print(help_text())
    else:
        _print_named(own.name, as_json=own.json)
    return EXIT_DONE


def _print_named(asked: str, *, as_json: bool) -> None:
    name = asked.replace("-", "_").lower()
    other = SAME.get(name) or SAME_FOR_VALUES.get(name, ("",))[0]
    option = options_by_name().get(name) or options_by_name().get(other)
    if option is not None:
        facts = describe_option(option)
        print_result(facts, description_lines(facts), as_json=as_json)
        return
    if name in DIFFERENT:
        raise UserError(f"crosstune has no option {name}.", do=f"instead: {DIFFERENT[name]}")
    found = [o for o in option_list() if name and any(name in known for known in (o.name, *o.aliases))]
    if not found:
        close = suggestions(name)
        do = f"did you mean {' or '.join(close)}?" if close else "see: crosstune options"
        raise UserError(f"No option name contains {shown(asked)}.", do=do)
    if as_json:
        print_json([describe_option(option) for option in found])
    else:
        print(help_text(only=[option.name for option in found]).strip("\n"))
