"""The child process of a rehearsal: plan the request again, run its step, and write lines of JSON with progress and counts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.estimate.machine import Machine
from crosstune.planner.gather import make_plan
from crosstune.process.ranks import Ranks


def main() -> None:
    asked = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print

    def reply(found: dict[str, Any]) -> None:
        replies.write(json.dumps(found) + "\n")
        replies.flush()

    from crosstune.torch_engine.rehearse import rehearse

    ranks = Ranks(**asked["ranks"])
    plan = make_plan(
        make_config(**asked["options"]),
        machine=Machine.from_json(asked["machine"], source="the plan"),
        longest_row=asked["longest_row"],
        ranks=ranks,
    )
    folder = Path(asked["folder"]) if asked["folder"] is not None else None
    counted = rehearse(plan, ranks, folder=folder, on_progress=lambda text: reply({"progress": text}))
    reply({"counted": counted.to_json()})
