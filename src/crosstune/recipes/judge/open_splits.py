"""Open the training, validation and test items of a configuration, and check for leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crosstune.config.schema import Config
from crosstune.core.errors import naming
from crosstune.data.columns import parse_columns
from crosstune.data.dataset_list import unweighted
from crosstune.data.files import file_part
from crosstune.data.named_datasets import JUDGED, RowsPart
from crosstune.data.sources import Part, Source, open_source, split_of
from crosstune.recipes.judge.items import Item, common_scale
from crosstune.recipes.judge.read_items import TARGETS, ItemReader
from crosstune.recipes.judge.scale import Scale, read_scale
from crosstune.recipes.judge.splits import check_ids, split_groups, without_leaks

HELD_OUT_SHARE = 0.1
TEST_SPLITS = ("test", "eval")


@dataclass(frozen=True, kw_only=True)
class JudgeData:
    """The items of a run by split. A split is empty if it was not asked for, or if the data is too small."""

    train: Sequence[Item]
    val: Sequence[Item]
    test: Sequence[Item]
    num_leaking: int = 0
    """Training items left out because they leak."""
    notes: Sequence[str] = ()
    scale: Scale
    """The scale of the scores: --score_scale, or else the one that the rows name."""


def item_reader(config: Config, *, labelled: bool = True, scale: Scale | None = None) -> ItemReader:
    """Return a reader for the options of a configuration. `scale` is the default if neither user nor data names one."""
    asked = "score_scale" in config.sources
    return ItemReader(
        scale=read_scale(config.score_scale) if asked or scale is None else scale,
        scale_asked=asked,
        columns=parse_columns(config.columns, targets=TARGETS),
        group_by=config.group_by,
        references=config.references,
        labelled=labelled,
    )


def open_judge_data(config: Config) -> JudgeData:
    """Read the items of --dataset, --eval_dataset and --test_dataset; hold out a tenth of the groups for each missing
    split."""
    reader = item_reader(config)
    sources = [by_split(entry.name) for entry in unweighted(config.dataset, option="dataset")]
    found = {
        split: [item for source in sources if split in source for item in reader.read(source[split])]
        for split in ("train", "val", "test")
    }
    for split, option in (("val", "eval_dataset"), ("test", "test_dataset")):
        name = getattr(config, option)
        if name:
            with naming(option):
                found[split] = [
                    item
                    for entry in unweighted(name, option=option)
                    for item in read_split(reader, entry.name, split)
                ]
    everything = [item for items in found.values() for item in items]
    reader.check_together(everything, config.dataset)
    scale = common_scale(everything, default=reader.scale)
    missing = [split for split in ("val", "test") if not found[split]]
    notes = []
    if missing:
        shares = dict.fromkeys(missing, HELD_OUT_SHARE)
        divided = split_groups(found["train"], shares=shares, seed=config.seed)
        found |= divided
        named = " and ".join({"val": "validation", "test": "test"}[split] for split in missing)
        notes.append(
            f"a tenth of the groups is held out for {named}: whole groups, so that no source is in two splits"
        )
    check_ids({split: items for split, items in found.items() if split != "train"})
    held_out = {split: found[split] for split in ("val", "test") if found[split]}
    train, num_leaking = without_leaks(found["train"], held_out, policy=config.leaks)
    if config.dataset_samples != -1:
        train = train[: config.dataset_samples]
    most = config.eval_samples
    return JudgeData(
        train=train,
        val=[] if config.skip_eval else found["val"][:most],
        test=found["test"][:most] if "eval_samples" in config.sources else found["test"],
        num_leaking=num_leaking,
        notes=notes,
        scale=scale,
    )


def read_split(reader: ItemReader, name: str, split: str) -> list[Item]:
    """Return the items of a source given for one split: its split of that name, or else its first one."""
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
    for part in source.held_out:
        parts.setdefault(_split_name(part, folder), []).append(part)
    for file in source.unused:
        part = file_part(folder / file)
        parts.setdefault(_split_name(part, folder), []).append(part)
    return {
        split: replace(source, parts=tuple(found), held_out=(), unused=())
        for split, found in parts.items()
        if found
    }


def _split_name(part: Part, folder: Path) -> str:
    """Return val or test for a held-out part: a file by its name, a split of the hub by its own."""
    path = getattr(part, "path", None)
    named = split_of(path.relative_to(folder)) if path is not None else getattr(part, "split", "val")
    return "test" if named in TEST_SPLITS else "val"
