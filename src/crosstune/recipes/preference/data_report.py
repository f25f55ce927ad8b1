"""Describe the preferences of a run: an account of all rows, lengths, and warnings about misleading pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from crosstune.data.prompt_rows import PromptRows, prompt_key
from crosstune.recipes.preference.losses import PreferenceLoss
from crosstune.recipes.preference.open_pairs import PreferenceCorpus
from crosstune.recipes.preference.read_pairs import Preference

MAX_MEASURED = 5000
"""Maximum number of pairs whose lengths are measured."""
BIASED = 0.7
MIN_PAIRS = 20
BALANCE = "balance the lengths of the pairs"
_SIDES = ("chosen", "rejected")
BY_LENGTH = ("simpo", "ipo", "orpo")
"""Losses of log probabilities per token."""


def account(
    data: PromptRows[Preference], train: PreferenceCorpus, held_out: PreferenceCorpus | None
) -> dict[str, int]:
    """Return the number of rows read, and their number by outcome. A row of a pair may be two answers with labels."""
    kept = [{one.place for one in part.preferences} if part else set[str]() for part in (train, held_out)]
    opened = {one.place for one in (*data.train, *data.held_out)}
    return {
        "read": data.num_rows,
        "trained": len(kept[0]),
        "held_out": len(kept[1]),
        "same": data.num_left_out,
        "too_long": len(opened - kept[0] - kept[1]),
        "bad": len(data.skipped),
        "unused": data.num_rows - len(opened) - data.num_left_out - len(data.skipped),
    }


def describe_answers(train: PreferenceCorpus) -> dict[str, Any]:
    """Return the number of answers of each side, and their mean and maximum length in tokens."""
    groups = [train[place] for place in range(min(len(train), MAX_MEASURED))]
    if len(groups[0].examples) == 2:
        lengths = {side: [group.lengths[place] for group in groups] for place, side in enumerate(_SIDES)}
    else:
        lengths = {
            side: [group.lengths[0] for group in groups if group.is_desirable is good]
            for side, good in (("desirable", True), ("undesirable", False))
        }
    return {
        side: {"answers": len(found), "mean_tokens": float(np.mean(found)), "longest": max(found)}
        for side, found in lengths.items()
        if found
    }


def pair_warnings(
    rows: Mapping[str, int],
    train: PreferenceCorpus,
    held_out: PreferenceCorpus | None,
    *,
    loss: PreferenceLoss,
    num_cut: int,
) -> list[str]:
    found = list[str]()
    left_out = {
        "same": "their two answers are the same",
        "too_long": "an answer does not fit the context",
        "bad": "they cannot be read",
    }
    for name, why in left_out.items():
        if rows[name]:
            found.append(f"{rows[name]} of {rows['read']} rows are left out: {why}")
    parts = [part for part in (train, held_out) if part is not None]
    if halves := sum(part.num_too_long for part in parts) - rows["too_long"]:
        found.append(f"rows with one answer that does not fit the context and is left out: {halves}")
    if num_cut:
        found.append(
            f"rows with an answer that is cut at the context: {num_cut}, whose end is not compared; raise "
            "--context_length"
        )
    pairs = [(prompt_key(one), str(one.answers), one.is_desirable) for one in train.preferences]
    if repeated := len(pairs) - len(set(pairs)):
        found.append(f"{repeated} of {len(pairs)} rows repeat an earlier row")
    if turned := _num_turned(train.preferences):
        what = "pairs in both orders" if loss.is_paired else "answers with both labels"
        found.append(f"the data has {what}: {turned}; they cancel out, so keep one of each")
    if held_out is not None:
        prompts = {prompt_key(one) for one in train.preferences}
        if shared := sum(prompt_key(one) in prompts for one in held_out.preferences):
            found.append(f"{shared} of {len(held_out)} held-out prompts are also in the training data")
    if loss.is_paired:
        lengths = [train[place].lengths for place in range(min(len(train), MAX_MEASURED))]
        found += length_bias(lengths, advice=length_advice(loss.weights))
    return found


def _num_turned(preferences: Sequence[Preference]) -> int:
    """Return the number of pairs that also occur with the answers swapped, or of answers with both labels."""
    if preferences[0].is_desirable is not None:
        labels = [
            {(prompt_key(one), str(one.answers)) for one in preferences if one.is_desirable is good}
            for good in (True, False)
        ]
        return len(labels[0] & labels[1])
    pairs = {(prompt_key(one), *map(str, one.answers)) for one in preferences}
    return sum((prompt, rejected, chosen) in pairs for prompt, chosen, rejected in pairs) // 2


def length_advice(losses: Collection[str]) -> str:
    """Return advice against learning length, for a run with these losses."""
    if any(name in BY_LENGTH for name in losses):
        return BALANCE
    return f"{BALANCE}, or compare with --preference_loss simpo or ipo, which divide by it"


def length_bias(lengths: Sequence[Sequence[int]], *, advice: str, unit: str = "tokens") -> list[str]:
    """Return a warning if length alone distinguishes most better answers from worse answers. `lengths`: (better, worse) of
    each pair.
    """
    pairs = np.array(lengths).reshape(-1, 2)
    longer = {side: float((pairs[:, own] > pairs[:, 1 - own]).mean()) for own, side in enumerate(_SIDES)}
    side = max(longer, key=lambda name: longer[name])
    if len(pairs) < MIN_PAIRS or longer[side] <= BIASED:
        return []
    means = " and ".join(f"{mean:.0f}" for mean in pairs.mean(axis=0))
    return [
        f"the {side} answer is longer in {longer[side]:.0%} of the pairs (mean {means} {unit}): the model may learn length; "
        f"{advice}"
    ]
