"""`crosstune data`: check a dataset, and show its examples as training reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, announce_command, at_least, parse_config, print_result
from crosstune.cli.terminal.figures import count
from crosstune.cli.terminal.streams import styled
from crosstune.core.errors import EXIT_DONE, UserError
from crosstune.core.safe_text import printable

if TYPE_CHECKING:
    from crosstune.config.schema import Config
    from crosstune.recipes.preference.recipe import PreferenceRecipe
    from crosstune.recipes.rl.recipe import RlRecipe
    from crosstune.recipes.sft import SftRecipe

_CHARACTERS_SHOWN = 1600
"""Maximum length of an example in the report; --json has all of it."""
_LINES_SHOWN = 10
"""Bad rows with the same reason whose lines are listed."""

EXAMPLES = """examples:
  crosstune data chats.jsonl
  crosstune data chats.jsonl --model_name ORG/MODEL --context_length 1024 --packing --show 5
  crosstune data my-folder --train_on_prompt --json
  crosstune data support.csv --columns query=prompt,reply=completion
  crosstune data chats.jsonl:0.7,code.jsonl:0.3
  crosstune data pairs.jsonl --recipe preference
  crosstune data tasks.jsonl --recipe rl

The supervised part of an example is colored on a terminal and in [[ ]] elsewhere."""


def make_parser() -> Parser:
    parser = Parser(
        "data",
        description="`crosstune data SOURCE [options]` checks a dataset and shows which tokens the loss covers.\n"
        "SOURCE is a value of --dataset; the options of train are accepted.",
        epilog=EXAMPLES,
    )
    shown = "print the first N examples (default 3)"
    parser.add_argument("--show", type=at_least(0), default=3, metavar="N", help=shown)
    return parser


def run(words: Sequence[str]) -> int:
    has_source = bool(words) and not words[0].startswith("-")
    if has_source and not words[0].strip():
        raise UserError(
            "SOURCE is blank.", do="pass a file, a folder or a name, as in crosstune data chats.jsonl"
        )
    own, config = parse_config(make_parser(), [*["--dataset"] * has_source, *words])
    if config.recipe == "distill":  # the same rows
        config = replace(config, recipe="sft")
    if config.recipe not in ("sft", "preference", "rl"):
        others = {"judge": "crosstune judge data", "latent_diffusion": "crosstune latents"}
        raise UserError(
            f"crosstune data reads conversations, text, preferences and prompts, not data of the {config.recipe} recipe.",
            do=f"use {others[config.recipe]}" if config.recipe in others else "remove --recipe",
        )

    announce_command("data", config.dataset or "the bundled data", "reading")
    from crosstune.cli.terminal.output import WARNING
    from crosstune.cli.terminal.screen import Screen
    from crosstune.core.events import Warned
    from crosstune.models.folder import longest_context
    from crosstune.runs.open_parts import find_model

    with Screen(live=True) as screen:
        model = find_model(config, screen)
        limit = longest_context(model.path)
        if limit is not None and limit < config.context_length:  # as training does
            lowered = f"is lowered from {config.context_length} to {limit}, the model's context"
            screen.on_event(Warned(message=f"context_length {lowered}"))
            config = replace(config, context_length=limit)
        # Rows that would stop training are reported too.
        recipe = _open(
            replace(config, skip_bad_rows=True), cut_long=True, model_folder=model.path, observer=screen
        )
    report = recipe.describe()
    marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() and not own.json else ("[[", "]]")
    places = range(min(own.show, len(recipe.train)))
    pieces = [_pieces(recipe, place, whole=own.json) for place in places]
    shown = [_marked(each, *marks) for each in pieces]
    lines = ((line, WARNING if line.startswith("warning") else None) for line in report_lines(report))
    bad = [json.loads(row) for row in recipe.skipped_rows()]
    found = {**report, "model": model.name, "shown": shown, "pieces": pieces, "bad_rows": bad}
    print_result(found, lines, as_json=own.json)
    for number, text in enumerate(shown if not own.json else (), start=1):
        print(f"\nexample {number}\n{text}", file=styled(sys.stdout))  # the text is already escaped
    stops = bool(bad) and not config.skip_bad_rows
    for line in _bad_rows(bad) if stops else ():
        print(printable(line), file=styled(sys.stderr))
    num_long = report["train"].get("cut_examples", report["train"]["dropped_examples"])
    if stops or (config.truncation == "error" and num_long):
        _open(config, model_folder=model.path)  # raises as training does
    return EXIT_DONE


def _bad_rows(bad: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each reason with the lines of its rows."""
    lines, is_cut = dict[tuple[str, str], list[str]](), False
    for row in bad[1:]:  # the first is the error of the command
        name, number = str(row["file"]), str(row["line"])
        reason = row["reason"].removeprefix(f"{name}, line {number}").lstrip(": ")
        lines.setdefault((name, reason), []).append(number)
    for (name, reason), numbers in lines.items():
        listed = ", ".join(numbers[:_LINES_SHOWN])
        more = f" and {len(numbers) - _LINES_SHOWN:,} more" if len(numbers) > _LINES_SHOWN else ""
        is_cut |= bool(more)
        yield f"{name}, line{'s' * (len(numbers) > 1)} {listed}{more}: {reason}"
    if is_cut:
        yield "all rows that cannot be read: `bad_rows` of --json"


def _open(config: Config, *, cut_long: bool = False, **parts: Any) -> SftRecipe | PreferenceRecipe | RlRecipe:
    """Open the data with its recipe; with `cut_long`, long examples that training would reject are cut or left out."""
    if config.recipe == "sft":
        from crosstune.recipes.sft import SftRecipe

        return SftRecipe(config, cut_long=cut_long, **parts)
    if config.recipe == "preference":
        from crosstune.recipes.preference.recipe import PreferenceRecipe

        return PreferenceRecipe(config, cut_long=cut_long, **parts)
    from crosstune.recipes.rl import LONGEST_ANSWER
    from crosstune.recipes.rl.recipe import RlRecipe

    if "max_new_tokens" not in config.sources:  # as the preset of training
        config = replace(config, max_new_tokens=LONGEST_ANSWER)
    return RlRecipe(config, cut_long=cut_long, **parts)


def _pieces(
    recipe: SftRecipe | PreferenceRecipe | RlRecipe, place: int, *, whole: bool
) -> list[tuple[str, bool]]:
    """Return the text of an example in pieces, each with a flag for supervision; of a preference both answers with their
    labels and lengths. Without `whole`, leave out the middle of a long text."""
    from crosstune.data.preflight import cut_middle, marked_pieces

    example: Any = recipe.train[place] if recipe.config.recipe != "rl" else recipe.example(place)  # type: ignore[union-attr]
    answers = getattr(example, "examples", None)
    if answers is None:
        pieces = marked_pieces(example, recipe.tokenizer)
        return pieces if whole else cut_middle(pieces, limit=_CHARACTERS_SHOWN)
    label = "desirable" if example.is_desirable else "undesirable"
    found = list[tuple[str, bool]]()
    for name, answer in zip(("chosen", "rejected") if len(answers) == 2 else (label,), answers, strict=True):
        head = f"{name}: {len(answer.tokens):,} tokens, {int(answer.supervised.sum()):,} in the answer"
        pieces = marked_pieces(answer, recipe.tokenizer)
        found += [("\n" * bool(found) + head + "\n", False)]
        found += pieces if whole else cut_middle(pieces, limit=_CHARACTERS_SHOWN)
    return found


def _marked(pieces: Sequence[tuple[str, bool]], begin: str, end: str) -> str:
    """Return pieces as one text, escaped, with the supervised ones marked."""
    return "".join(f"{begin}{printable(text)}{end}" if counts else printable(text) for text, counts in pieces)


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the data report of a recipe, from its `describe`, as lines."""
    train = report["train"]
    rows = {
        "data": f"{report['dataset']}, read as {report['format']}",
        "identity": report["identity"][:16],
        "rows": _account(report["rows"]) if "rows" in report else f"{train['rows']:,}",
        "tokens": _tokens(train),
        "lengths": f"50 % up to {train['length_p50']:,}, 90 % up to {train['length_p90']:,}, "
        f"99 % up to {train['length_p99']:,}, longest {train['longest']:,} (context {report['context_length']:,})",
        "too long": _too_long(train, stops=report.get("stops_at_long", False)),
        "duplicates": f"{train['duplicates']:,}",
    }
    for side, found in report.get("sides", {}).items():
        rows[side] = (
            f"{found['answers']:,} answers, {found['mean_tokens']:.0f} tokens on average, longest {found['longest']:,}"
        )
    if "packed_rows" in report:
        rows["packed"] = f"{report['packed_rows']:,} rows, {report['packed_fill']:.1%} full"
    if "eval" in report:
        held_out = report["eval"]
        tokens = f", {count(held_out['tokens'])} tokens" if "tokens" in held_out else ""
        rows["held out"] = f"{held_out['examples']:,} {'examples' if tokens else 'prompts'}{tokens}"
    rows["steps"] = f"{report['num_steps']:,}"
    lines = [f"{name:<11} {value}" for name, value in rows.items()]
    lines += [f"{'note':<11} {sentence}" for sentence in report.get("notes", ())]
    return lines + [f"{'warning':<11} {sentence}" for sentence in report.get("warnings", ())]


def _tokens(train: Mapping[str, Any]) -> str:
    if "supervised_share" not in train:
        return f"{count(train['tokens'])} in {train['examples']:,} prompts"
    return (
        f"{count(train['tokens'])} in {train['examples']:,} examples, {count(train['supervised_tokens'])} supervised "
        f"({train['supervised_share']:.1%})"
    )


def _too_long(train: Mapping[str, Any], *, stops: bool) -> str:
    """Describe the handling of examples longer than the context; with `stops`, training rejects them."""
    if "cut_examples" not in train:  # prompts, which are never cut
        dropped = train["dropped_examples"]
        return f"{dropped:,}{': training stops unless --truncation is drop' if stops and dropped else ' left out'}"
    cut, tokens = train["cut_examples"], train["cut_tokens"]
    if stops and cut:
        return f"{cut:,}, by {tokens:,} tokens: training stops unless --truncation is cut or drop"
    return f"{train['dropped_examples']:,} left out, {cut:,} cut by {tokens:,} tokens"


def _account(rows: Mapping[str, int]) -> str:
    """Account for every row that was read: "300 read = 240 to train on + 30 held out + 30 empty"."""
    names = {
        "trained": "to train on",
        "held_out": "held out",
        "empty": "empty",
        "without_answer": "without an answer",
        "too_long": "too long",
        "duplicates": "duplicate",
        "bad": "unreadable",
        "same": "with two equal answers",
        "unused": "beyond --dataset_samples" if "empty" in rows else "beyond --eval_samples",
    }
    parts = [
        f"{rows[name]:,} {title}" for name, title in names.items() if rows.get(name) or name == "trained"
    ]
    return f"{rows['read']:,} read = {' + '.join(parts)}"
