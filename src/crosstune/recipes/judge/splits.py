"""Divide items into splits by group, and find leaks between splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstune.core.errors import UserError, shown
from crosstune.recipes.judge.items import Item

Splits = Mapping[str, Sequence[Item]]
_SPLIT_KEY = 2**33


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Training items that are also in a held-out split."""

    split: str
    kind: str
    """`group`, `id` or `text`."""
    example: str
    places: tuple[int, ...]
    """Their indices in the training split."""


def split_groups(items: Sequence[Item], *, shares: Mapping[str, float], seed: int) -> dict[str, list[Item]]:
    """Divide items at random, whole groups at a time. `shares` are shares of the groups; the rest is named train. Each
    share gets at least one group if there are enough."""
    groups = sorted({item.group for item in items})
    draw = np.random.Generator(np.random.Philox(key=(seed, _SPLIT_KEY)))
    order = [groups[place] for place in draw.permutation(len(groups))]
    named: dict[str, str] = {}
    start = 0
    for name, share in shares.items():
        count = min(max(1, round(share * len(groups))), max(0, len(groups) - start - 1))
        named |= dict.fromkeys(order[start : start + count], name)
        start += count
    found: dict[str, list[Item]] = {name: [] for name in ("train", *shares)}
    for item in items:
        found[named.get(item.group, "train")].append(item)
    return found


def find_leaks(train: Sequence[Item], held_out: Splits) -> list[Leak]:
    """Return the training items whose group, id or text is also in a held-out split."""
    leaks = []
    texts: dict[str, Callable[[Item], Hashable]] = {
        "group": lambda item: _normal(item.group),
        "text": lambda item: tuple(map(_normal, item.key)),
    }
    for split, items in held_out.items():
        kinds = dict(texts)
        if _has_own_ids(train) and _has_own_ids(items):
            kinds["id"] = lambda item: item.id
        for kind, key in kinds.items():
            known = {key(item) for item in items}
            places = tuple(place for place, item in enumerate(train) if key(item) in known)
            if places:
                example = train[places[0]]
                shown_part = (
                    example.id if kind == "id" else example.group if kind == "group" else example.task
                )
                leaks.append(Leak(split=split, kind=kind, example=shown_part, places=places))
    return leaks


def without_leaks(train: Sequence[Item], held_out: Splits, *, policy: str) -> tuple[list[Item], int]:
    """Return the training items that do not leak, and the number left out.

    `policy` is the value of --leaks: error raises, drop leaves items out, allow keeps them.
    """
    leaks = find_leaks(train, held_out) if policy != "allow" else []
    if not leaks:
        return list(train), 0
    leaking = {place for leak in leaks for place in leak.places}
    if policy == "error":
        first = leaks[0]
        raise UserError(
            f"{len(leaking):,} of {len(train):,} training rows leak into the held-out data.",
            why=f"the {first.kind} {shown(first.example)} is also in the {first.split} split, so the test "
            "would measure memorisation.",
            do="leave them out of the training with --leaks drop, split by source again with "
            "`crosstune judge data DATA --split_to DIR`, or accept it with --leaks allow",
        )
    kept = [item for place, item in enumerate(train) if place not in leaking]
    if not kept:
        raise UserError(
            "No training row is left.",
            why="every one of them is also in the held-out data.",
            do="split the data again with `crosstune judge data DATA --split_to DIR`",
        )
    return kept, len(leaking)


def check_ids(splits: Splits) -> None:
    """Raise for an id that occurs twice in a split: predictions are identified by id."""
    for split, items in splits.items():
        counts = Counter(item.id for item in items)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UserError(
                f"{len(twice)} ids of the {split} split occur more than once, such as {shown(twice[0])}.",
                do="give every row an id of its own, or leave the column out",
            )


def _has_own_ids(items: Sequence[Item]) -> bool:
    """Return whether ids identify items across splits, rather than count the rows of each split."""
    return not any(
        all(item.id == str(place) for place, item in enumerate(items, start=start)) for start in (0, 1)
    )


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
