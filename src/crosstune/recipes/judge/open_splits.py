"""Open the training, validation and test items of a configuration, without leaks between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, shown
from crosstune.data.named_datasets import JUDGED, RowsPart
from crosstune.data.read.columns import parse_columns
from crosstune.data.read.dataset_list import unweighted
from crosstune.data.read.files import file_part
from crosstune.data.read.sources import Part, Source, open_source, split_of
from crosstune.recipes.judge.items import Item, Scale, common_scale, read_scale
from crosstune.recipes.judge.read_items import TARGETS, ItemReader

Splits = Mapping[str, Sequence[Item]]
HELD_OUT_SHARE = 0.1
TEST_SPLITS = ("test", "eval")
_SPLIT_KEY = 2**33


@dataclass(frozen=True, kw_only=True)
class JudgeData:
    """The items of a run by split. A split is empty if it is off or the data is too small."""

    train: Sequence[Item]
    val: Sequence[Item]
    test: Sequence[Item]
    num_leaking: int = 0
    """Number of training items dropped because they leak."""
    notes: Sequence[str] = ()
    skipped: Sequence[str] = ()
    """Rows that cannot be read, as JSON text: file, line and reason."""
    scale: Scale
    """The scale of the scores: --score_scale, or the scale in the rows."""


def open_judge_data(config: Config) -> JudgeData:
    """Read the items of all splits; hold out a tenth of the groups for each missing split."""
    reader = replace(item_reader(config), skipped=[] if config.skip_bad_rows else None)
    sources = [by_split(entry.name) for entry in unweighted(config.dataset, option="dataset")]
    found = {
        split: [item for source in sources if split in source for item in reader.read(source[split])]
        for split in ("train", "val", "test")
    }
    for split, option in (("val", "eval_dataset"), ("test", "test_dataset")):
        if name := getattr(config, option):
            with naming(option):
                found[split] = [
                    item
                    for entry in unweighted(name, option=option)
                    for item in read_split(reader, entry.name, split)
                ]
    everything = [item for items in found.values() for item in items]
    reader.check_together(everything, config.dataset)
    scale = common_scale(everything, default=reader.scale)
    notes = []
    if config.head == "scalar" and (ties := len(everything) - len(without_ties(everything))):
        found = {split: without_ties(items) for split, items in found.items()}
        notes.append(f"{ties:,} pairs without a better answer are left out")
    if missing := [split for split in ("val", "test") if not found[split]]:
        shares = dict.fromkeys(missing, HELD_OUT_SHARE)
        found |= split_groups(found["train"], shares=shares, seed=config.seed)
        named = " and ".join({"val": "validation", "test": "test"}[split] for split in missing)
        notes.append(
            f"a tenth of the groups is held out for {named}: whole groups, so that no source is in two splits"
        )
    held_out = {split: found[split] for split in ("val", "test") if found[split]}
    check_ids(held_out)
    train, num_leaking = without_leaks(found["train"], held_out, policy=config.leaks)
    return JudgeData(
        train=train if config.dataset_samples == -1 else train[: config.dataset_samples],
        val=[] if config.skip_eval else found["val"][: config.eval_samples],
        test=found["test"][: config.eval_samples] if "eval_samples" in config.sources else found["test"],
        num_leaking=num_leaking,
        notes=notes,
        skipped=reader.skipped or (),
        scale=scale,
    )


def without_ties(items: Sequence[Item]) -> list[Item]:
    """Return the items that a reward model can learn from or be tested on."""
    return [item for item in items if item.winner != "tie"]


def item_reader(
    config: Config, *, labeled: bool = True, scale: Scale | None = None, rewards: bool = False
) -> ItemReader:
    """Return a reader for the options of a configuration. `scale` is the default if neither user nor data specifies one."""
    asked = "score_scale" in config.sources
    return ItemReader(
        scale=read_scale(config.score_scale) if asked or scale is None else scale,
        scale_asked=asked,
        columns=parse_columns(config.columns, targets=TARGETS),
        group_by=config.group_by,
        references=config.references,
        labeled=labeled,
        rewards=rewards,
    )


def read_split(reader: ItemReader, name: str, split: str) -> list[Item]:
    """Return the items of a source passed for one split: its split of that name, or its first split."""
    found = by_split(name, needs_training=False)
    return reader.read(found.get(split) or next(iter(found.values())))


def by_split(name: str, *, needs_training: bool = True) -> dict[str, Source]:
    """Return the splits of a source: train, and val and test if it has them."""
    if name in JUDGED:
        return {
            split: Source(name=name, parts=(RowsPart(name=f"{name} ({split})", loaded=JUDGED[name](split)),))
            for split in ("train", "val", "test")
        }
    source = open_source(name, needs_training=needs_training)
    folder = Path(name).expanduser()
    parts: dict[str, list[Part]] = {"train": list(source.parts)}
    for part in (*source.held_out, *(file_part(folder / file) for file in source.unused)):
        parts.setdefault(_split_name(part, folder), []).append(part)
    return {
        split: replace(source, parts=tuple(found), held_out=(), unused=())
        for split, found in parts.items()
        if found
    }


def _split_name(part: Part, folder: Path) -> str:
    """Return val or test for a held-out part: from the name of its file, or of its split on the hub."""
    path = getattr(part, "path", None)
    named = split_of(path.relative_to(folder)) if path is not None else getattr(part, "split", "val")
    return "test" if named in TEST_SPLITS else "val"


def split_groups(items: Sequence[Item], *, shares: Mapping[str, float], seed: int) -> dict[str, list[Item]]:
    """Split items at random by whole groups. `shares` are fractions of the groups, and the rest is `train`.

    Each split gets at least one group if there are enough.
    """
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


def check_ids(splits: Splits) -> None:
    """Raise for an id that occurs twice in a split: predictions are identified by id."""
    for split, items in splits.items():
        counts = Counter(item.id for item in items)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UserError(
                f"{len(twice)} ids of the {split} split occur more than once, such as {shown(twice[0])}.",
                do="give every row a different id, or remove the column",
            )


class Leak(NamedTuple):
    """A training item that is also in a held-out split."""

    place: int
    kind: str
    """`group`, `id` or `text`."""
    example: str
    split: str


def without_leaks(train: Sequence[Item], held_out: Splits, *, policy: str) -> tuple[list[Item], int]:
    """Return the training items that do not leak, and the number of dropped items.

    `policy` is the value of --leaks: error raises, drop removes items, allow keeps them.
    """
    leaks = find_leaks(train, held_out) if policy != "allow" else []
    if not leaks:
        return list(train), 0
    leaking = {leak.place for leak in leaks}
    if policy == "error":
        first = leaks[0]
        raise UserError(
            f"{len(leaking):,} of {len(train):,} training rows leak into the held-out data.",
            why=f"the {first.kind} {shown(first.example)} is also in the {first.split} split, so the test "
            "would measure memorization.",
            do="drop them from the training data with --leaks drop, split by source again with "
            "`crosstune judge data DATA --split_to DIR`, or accept it with --leaks allow",
        )
    kept = [item for place, item in enumerate(train) if place not in leaking]
    if not kept:
        raise UserError(
            "There is no training row without a leak.",
            why="every row is also in the held-out data.",
            do="split the data again with `crosstune judge data DATA --split_to DIR`",
        )
    return kept, len(leaking)


def find_leaks(train: Sequence[Item], held_out: Splits) -> list[Leak]:
    """Return the training items whose group, id or text is also in a held-out split."""
    leaks = []
    for split, items in held_out.items():
        own_ids = _has_own_ids(train) and _has_own_ids(items)
        known = {key for item in items for key in _keys(item, own_ids)}
        for place, item in enumerate(train):
            leaks += [Leak(place, key[0], key[1], split) for key in _keys(item, own_ids) if key in known]
    return leaks


def _keys(item: Item, own_ids: bool) -> list[tuple[str, ...]]:
    keys = [("group", _normal(item.group)), ("text", *map(_normal, (item.task, *item.answers)))]
    return [*keys, ("id", item.id)] if own_ids else keys


def _has_own_ids(items: Sequence[Item]) -> bool:
    """Return True if ids identify items across splits, rather than number the rows of each split."""
    return not any(
        all(item.id == str(place) for place, item in enumerate(items, start=start)) for start in (0, 1)
    )


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
