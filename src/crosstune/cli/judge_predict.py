"""`crosstune judge predict`: judge answers that have no label."""

from __future__ import annotations

import argparse

from crosstune.cli.arguments import print_json
from crosstune.cli.judge_eval import make_request
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, UserError


def run_action(own: argparse.Namespace, config: Config) -> int:
    if own.target is None or own.input is None:
        raise UserError(
            "judge predict needs a judge and answers.",
            do="crosstune judge predict RUN --input FILE [--output FILE]",
        )
    from crosstune.cli.output import print_line
    from crosstune.cli.screen import Screen
    from crosstune.core.atomic_files import write_bytes
    from crosstune.core.json_files import to_json
    from crosstune.recipes.judge.open_splits import item_reader, read_split
    from crosstune.recipes.judge.predictions import prediction_row
    from crosstune.results.judge import ask, judge_scale, open_judge

    request = make_request(own, config, target=own.target, backend=config.backend)
    reader = item_reader(config, labelled=False, scale=judge_scale(request))
    items = read_split(reader, str(own.input), "test")
    with Screen(live=True) as screen:
        judge = open_judge(request, items=items, config=config, observer=screen)
        found = ask(judge, items, request, screen)
    rows = [
        {name: value for name, value in prediction_row(item, one).items() if name != "expected"}
        for item, one in zip(items, found, strict=True)
    ]
    if own.output is not None:
        write_bytes(own.output, "".join(f"{to_json(row)}\n" for row in rows).encode())
        print_line(f"written  {own.output} ({len(rows)} verdicts)")
    elif own.json:
        print_json(rows)
    else:
        for row in rows:
            said = row["predicted"]
            shown = "unreadable" if said is None else f"{said:.2f}" if isinstance(said, float) else said
            sure = f" ({row['confidence']:.0%} sure)" if row["confidence"] is not None else ""
            print_line(f"{row['id']}  {shown}{sure}")
    return EXIT_DONE
