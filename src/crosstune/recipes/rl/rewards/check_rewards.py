"""Check the rewards of a configuration before a run starts: weights, columns, and files without running them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from crosstune.config.options.rewards import FUNCTION, OF_COLUMNS, RewardSpec, parse_rewards
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.files.plain_files import read_plain_text
from crosstune.recipes.rl.rewards.functions import check_file, read_schema

_RUBRIC_LIMIT, _FILE_LIMIT = 1 << 20, 16 << 20


def reward_specs(config: Config) -> list[RewardSpec]:
    """Return the rewards of --reward, and the judge of --watch_judge without a weight."""
    try:
        specs = parse_rewards(config.reward, config.reward_weights) if config.reward else []
    except ValueError as error:
        raise UserError("--reward_weights does not match --reward.", do=f"expected {error}") from error
    if not specs:
        raise UserError("There is no reward.", do="pass --reward, as in --reward exact:answer")
    if not any(spec.weight for spec in specs):
        raise UserError(
            "No reward has a weight, so there is nothing to learn.",
            why=f"the rewards are {', '.join(spec.text for spec in specs)}.",
            do="specify what a good answer is with --reward",
        )
    if config.watch_judge is not None:
        text = f"judge:{config.watch_judge}"
        specs.append(RewardSpec(text=text, kind="judge", argument=config.watch_judge, weight=0.0))
    return specs


def check_columns(config: Config, known: Collection[str]) -> None:
    """Raise if a reward compares answers with a column that no row has."""
    missing = [
        spec.argument
        for spec in reward_specs(config)
        if spec.kind in OF_COLUMNS and spec.argument not in known
    ]
    if missing:
        raise UserError(
            f"A reward compares answers with the column {missing[0]}, which no row has.",
            why=f"the rows have {', '.join(sorted(known)) or 'no column next to the prompt'}.",
            do="correct the column in --reward, or add it to the data",
        )


def check_files(config: Config) -> None:
    """Raise if a file of a reward is missing or cannot be read. No code of a user runs."""
    for spec in reward_specs(config):
        if spec.kind == FUNCTION:
            _check_function(spec)
        elif spec.kind == "json" and spec.argument:
            read_schema(spec.argument)
        elif spec.kind == "server":
            read_rubric(config.rubric)


def read_rubric(file: str | None) -> str:
    if file is None:
        raise UserError(
            "--reward server:URL needs a rubric.",
            why="the server's model must know how to score.",
            do="write it into a text file, and pass it with --rubric FILE",
        )
    text = read_plain_text(Path(file).expanduser(), limit=_RUBRIC_LIMIT).strip()
    if not text:
        raise UserError(f"The rubric {file} is empty.", do="describe in it what makes an answer good")
    return text


def _check_function(spec: RewardSpec) -> None:
    file = Path(spec.argument).expanduser()
    check_file(file, spec.text)
    try:
        names = set(_names(ast.parse(read_plain_text(file, limit=_FILE_LIMIT))))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(
            f"--reward {spec.text} cannot be used.", why=f"{file} is not Python: {error}."
        ) from None
    if spec.function not in names and "*" not in names:
        raise UserError(
            f"--reward {spec.text} cannot be used.",
            why=f"{file} has no function {spec.function}.",
            do=f"define it there as `def {spec.function}(prompts, completions, **kwargs)`",
        )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines, imports or assigns anywhere; `*` if it imports all of another."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
