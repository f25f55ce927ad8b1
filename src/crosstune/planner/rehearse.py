"""Rehearse a run of several processes in one child process, and compare its counts with the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import child_environment, make_config
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.estimate.machine import Machine
from crosstune.estimate.rehearsal import Rehearsal
from crosstune.estimate.step_time import Cluster, StepTime
from crosstune.planner.gather import make_plan
from crosstune.planner.predict import DataFacts, cluster_of, speed_of
from crosstune.process.limited_child import main_of
from crosstune.process.ranks import Ranks

MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The counts of a rehearsal and the time computed from them."""

    counted: Rehearsal
    cluster: Cluster
    time: StepTime | None
    """None for a device of unknown speed."""

    def to_json(self) -> dict[str, Any]:
        time = self.time
        return {
            "counted": self.counted.to_json(),
            "computed": {
                "step_s": time.seconds,
                "tokens_per_s": time.tokens_per_s,
                "limited_by": time.limit,
                "exposed_communication_s": time.communication_s,
                "hidden_communication_s": time.hidden_s,
            }
            if time
            else None,
        }


def rehearse(
    plan: Plan,
    *,
    num_nodes: int,
    folder: Path | None,
    data: DataFacts | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Rehearsed:
    """Count a step of the plan in a child process."""
    check_rehearsal(plan)
    fitted, cluster = plan.fitted, cluster_of(plan, num_nodes=num_nodes)
    assert fitted is not None
    ranks = Ranks(engine="torch", size=cluster.size, local_size=cluster.num_local, num_nodes=num_nodes)
    request = {
        "options": plan.config.options_asked() | {"world_size": cluster.size},
        "machine": plan.machine.to_json(),
        "ranks": asdict(ranks),
        "folder": str(folder) if folder is not None else None,
        "longest_row": fitted.step.context if data is not None else None,
    }
    counted = Rehearsal.from_json(_run_child(request, on_progress))
    speed = speed_of(plan)
    row = data.tokens_per_row if data is not None else None
    time = None
    if speed is not None:
        time = counted.step_time(fitted.shape, fitted.step, speed, cluster=cluster, row=row)
    return Rehearsed(counted=counted, cluster=cluster, time=time)


def check_rehearsal(plan: Plan) -> None:
    """Raise a UserError for a plan that cannot be rehearsed."""
    config, fitted = plan.config, plan.fitted
    reason = do = ""
    if plan.engine != "torch" or config.recipe != "sft":
        reason, do = "it runs torch and the sft recipe only", "use a torch backend and --recipe sft"
    elif plan.world_size == 1 or plan.world_size > MAX_RANKS:
        reason = f"it is for 2 to {MAX_RANKS:,} processes, and the plan has {plan.world_size:,}"
        do = "add --machine NAME-x8 --nnodes N, or --world_size N"
    elif plan.quantizer != "none":
        reason, do = (
            "quantizers need the values of weights, which it does not have",
            "use --train_type lora or full",
        )
    elif plan.method == "llama_pro":
        reason, do = (
            "new blocks are copies of values, which it does not have",
            "use --train_type lora or full",
        )
    elif config.context_parallel > 1:
        reason, do = "it computes whole rows", "remove --context_parallel"
    elif config.kernels == "fast":
        reason, do = "it runs the general layers", "add --kernels general, or --sharding_strategy full_shard"
    elif config.use_cpu_offload or config.use_activation_cpu_offload:
        reason, do = "it does not tell host memory from device memory", "remove the offload"
    elif fitted is None or (fitted.shape.num_experts > 1 and fitted.shape.source != "config"):
        reason, do = "the sizes of the model are not known in detail", "use a model folder on this machine"
    if reason:
        raise UserError("This plan cannot be rehearsed.", why=f"{reason}.", do=do)


def _run_child(request: dict[str, Any], on_progress: Callable[[str], None]) -> dict[str, Any]:
    with subprocess.Popen(
        main_of("crosstune.planner.rehearse"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment({"CUDA_VISIBLE_DEVICES": ""}),
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        counted: dict[str, Any] | None = None
        try:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                reply = json.loads(line)
                if "progress" in reply:
                    on_progress(reply["progress"])
                counted = reply.get("counted", counted)
            said = child.stderr.read().strip().splitlines()
        except BaseException:
            child.kill()
            raise
    if counted is None:
        last = said[-1][:400] if said else f"its process ended with exit code {child.returncode}"
        raise UserError("The rehearsal failed.", why=f"{last}.", do="report it with the command")
    return counted


def main() -> None:
    """In the child process: plan the request again, run its step, and write lines of JSON with progress and counts."""
    asked = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print

    def reply(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=replies, flush=True)

    from crosstune.torch_engine import rehearse as engine

    ranks = Ranks(**asked["ranks"])
    plan = make_plan(
        make_config(**asked["options"]),
        machine=Machine.from_json(asked["machine"], source="the plan"),
        longest_row=asked["longest_row"],
        ranks=ranks,
    )
    folder = Path(asked["folder"]) if asked["folder"] is not None else None
    counted = engine.rehearse(plan, ranks, folder=folder, on_progress=lambda text: reply({"progress": text}))
    reply({"counted": counted.to_json()})
