"""`crosstune judge data`: show what a judge would learn from a data set, and split it by group."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import print_json
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from crosstune.recipes.judge.items import Item
    from crosstune.recipes.judge.verdicts import VerdictFormat


def run_action(own: argparse.Namespace, config: Config) -> int:
    from crosstune.cli.output import print_line
    from crosstune.recipes.judge.open_splits import open_judge_data
    from crosstune.recipes.judge.prompts import training_messages
    from crosstune.recipes.judge.verdicts import choose_format

    if "dataset" not in config.asked:
        raise UserError(
            "judge data needs a data set.", do="crosstune judge data FILE|FOLDER|judge_translations"
        )
    if own.split_to is not None:
        return _split(own, config)
    data = open_judge_data(config)
    splits = {"train": data.train, "val": data.val, "test": data.test}
    verdict = choose_format(config.verdict, scale=data.scale, items=list(data.train))
    described: dict[str, dict[str, Any]] = {
        name: {
            "items": len(items),
            "groups": len({item.group for item in items}),
            "with_reference": sum(bool(item.reference) for item in items),
            "labels": _labels(items, verdict),
        }
        for name, items in splits.items()
    }
    shown = [training_messages(item, verdict) for item in data.train[: own.show]]
    if own.json:
        print_json(
            {"verdict": verdict.name, "scale": str(verdict.scale), "splits": described, "shown": shown}
            | {"leaking_rows": data.num_leaking, "notes": list(data.notes)}
        )
        return EXIT_DONE
    print_line(f"data     {config.dataset}, judged by {verdict.name} on the scale {verdict.scale}")
    for name, facts in described.items():
        labels = "  ".join(f"{label}: {count}" for label, count in facts["labels"].items())
        print_line(
            f"{name:<8} {facts['items']:,} items in {facts['groups']:,} groups, "
            f"{facts['with_reference']:,} with a reference; {labels}"
        )
    print_line(
        f"leaks    {data.num_leaking:,} training rows that are also held out"
        + " were dropped" * bool(data.num_leaking)
    )
    for note in data.notes:
        print_line(f"note     {note}")
    for number, messages in enumerate(shown, start=1):
        said = "\n".join(str(message["content"]) for message in messages[:-1])
        print_line(f"\nexample {number}\n{said}\n[[{messages[-1]['content']}]]")
    return EXIT_DONE


def _labels(items: Sequence[Item], verdict: VerdictFormat) -> dict[str, int]:
    counts = Counter(verdict.label_of(item) for item in items)
    return {text: counts[place] for place, text in enumerate(verdict.labels.texts)}


def _split(own: argparse.Namespace, config: Config) -> int:
    """Write judge_train.json, judge_val.json and judge_test.json with whole groups."""
    from crosstune.cli.output import print_line
    from crosstune.core.json_files import write_json
    from crosstune.data.dataset_list import unweighted
    from crosstune.recipes.judge.items import common_scale
    from crosstune.recipes.judge.open_splits import HELD_OUT_SHARE, by_split, item_reader
    from crosstune.recipes.judge.read_items import split_row
    from crosstune.recipes.judge.splits import split_groups

    reader, folder = item_reader(config), Path(own.split_to)
    entries = unweighted(config.dataset, option="dataset")
    found: list[Item] = [
        item for entry in entries for source in by_split(entry.name).values() for item in reader.read(source)
    ]
    scale = common_scale(found, default=reader.scale)
    splits = split_groups(found, shares=dict.fromkeys(("val", "test"), HELD_OUT_SHARE), seed=config.seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"judge_{name}.json" for name in splits}
    if there := [path for path in paths.values() if path.exists()]:
        raise UserError(f"{there[0]} exists already.", do="choose another folder for --split_to")
    for name, items in splits.items():
        write_json(paths[name], [split_row(item, f"{name}-{n}", scale=scale) for n, item in enumerate(items)])
        groups = len({item.group for item in items})
        print_line(f"written  {paths[name]} ({len(items)} items in {groups} groups)")
    print_line(f"train    crosstune judge train --dataset {shlex.quote(str(folder))}")
    return EXIT_DONE
