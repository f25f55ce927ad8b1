"""`crosstune judge train`: train a judge, and test it on the test split."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from crosstune.cli.arguments import print_json
from crosstune.cli.train import leave_together, show_training
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED

if TYPE_CHECKING:
    from crosstune.tracking.observe import Tracking


def run_action(own: argparse.Namespace, config: Config) -> int:
    from crosstune.tracking.observe import Tracking

    with Tracking() as tracking:
        return _train_and_test(own, config, tracking)


def _train_and_test(own: argparse.Namespace, config: Config, tracking: Tracking) -> int:
    from crosstune.core.ranks import SingleProcess

    group = SingleProcess()
    result, report = show_training(config, group, command=own.words, tracking=tracking, as_json=own.json)
    leave_together(result, group)
    summary = result.summary | {"folder": str(result.folder), "report": str(report) if report else None}
    finished = summary["status"] == "finished"
    if finished and summary.get("result") and not config.skip_eval:
        from crosstune.cli.judge_eval import measure_run

        tested = measure_run(result.folder, own, config)
        counts = {name: tested[name] for name in ("num_items", "num_unreadable")}
        tracking.log_test(tested["metrics"] | counts, tested["worst"])
        summary["test"] = {
            name: tested[name] for name in ("metrics", "intervals", "num_items", "num_unreadable")
        }
    if own.json:
        print_json(summary)
    return EXIT_DONE if finished else EXIT_STOPPED
