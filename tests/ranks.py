"""Run trainings on several processes over gloo, forked from one that has imported torch, so that a start is quick."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import warm


def run_ranks(jobs: Sequence[Mapping[str, Any]], *, hook: str = "") -> None:
    """Do all jobs; raise with the output of the processes if one fails. Each job is {"world": N, "host": N, "runs":
    [options, ...]}: its processes train each of the runs in turn. `hook` is Python code that each rank runs first."""
    asked = json.dumps({"jobs": list(jobs), "hook": hook})
    code, said = warm.start("import sys, ranks; sys.exit(ranks.main(sys.argv[1]))", asked).end()
    assert code == 0, said[-12000:]


def main(text: str) -> int:
    """Do the jobs in forks of this process."""
    asked = json.loads(text)
    failed = False
    for job in asked["jobs"]:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        children = [_fork(rank, job, port, asked["hook"]) for rank in range(job["world"])]
        failed |= any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
        if failed:
            break
    return int(failed)


def _fork(rank: int, job: Mapping[str, Any], port: int, hook: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _train_all(rank, job, port, hook)
        code = 0
    except BaseException:  # noqa: BLE001  (printed, and the process ends)
        print(f"rank {rank} of {job['world']}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _train_all(rank: int, job: Mapping[str, Any], port: int, hook: str) -> None:
    from crosstune.config.load import make_config
    from crosstune.process.ranks import Limits, Ranks
    from crosstune.runs.pipeline import train
    from crosstune.torch_engine.group import connect

    size = job["world"]
    per_host = job.get("host") or size
    ranks = Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=rank % per_host,
        local_size=per_host,
        node_rank=rank // per_host,
        num_nodes=size // per_host,
        master_addr="127.0.0.1",
        master_port=port,
        serves_store=rank == 0,
    )
    group = connect(ranks, Limits(connect_s=600, collective_s=600))
    names: dict[str, Any] = {"group": group}
    exec(hook, names)
    runs = job["runs"]
    for options in runs:
        result = train(make_config(**options), group=group)
        if result.failure is not None:
            raise result.failure
    group.close()
