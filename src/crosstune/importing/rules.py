"""The form of the tables of keys, and the reasons that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from crosstune.importing.values import Convert, Missing, Nothing, Options

Rule: TypeAlias = "str | Nothing | Missing | Mapping[str, Options] | Convert"
"""The option with the same meaning, a reason, their value -> options, or a function."""


def by_name(groups: Mapping[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in groups.items() for name in names.split()}


def switch(**options: Any) -> dict[str, Options]:
    return {"true": options, "false": {}}


SPEED = Nothing("crosstune chooses this itself")
DEVICES = Nothing(
    "--world_size and --sharding_strategy set the devices; by default all of this machine are used"
)
OWN_LOSS = Nothing("crosstune has its own memory-saving loss and fast layers")
WORDS = Nothing("it changes only messages and logs")
HUB = Missing("after the run: crosstune push RUN --to ORG/NAME")
OPTIMIZERS = Missing("use --optimizer adamw, fused_adamw, adamw_8bit, lion, adafactor or sgd")
TOKENS = Missing("use --add_tokens for new tokens; the model's special tokens stay as they are")
RL = Missing("crosstune has no reinforcement learning")
PICTURES = Missing("crosstune trains on text only")
EXPERTS = Missing("experts are trained as their model defines them; the router stays frozen")
SPLIT = Missing("crosstune shards weights (--sharding_strategy), not layers or sequences")


def describe(rule: Rule) -> str:
    """Return a rule in one line of Markdown."""
    if isinstance(rule, Nothing):
        return f"no need: {rule}"
    if isinstance(rule, Missing):
        return f"no counterpart: {rule}"
    if isinstance(rule, str):
        return f"`{rule}`"
    if isinstance(rule, Mapping):
        texts = [
            f"{value or 'empty'}: "
            + (", ".join(f"`{name}: {ours}`" for name, ours in options.items()) or "as is")
            for value, options in rule.items()
        ]
        return "; ".join(texts)
    return "converted by its value"
