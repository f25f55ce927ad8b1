"""Read the rank of a process that srun started."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from crosstune.core.errors import UserError, shown
from crosstune.core.ranks import Ranks
from crosstune.distributed.variables import has, read_address, read_number, read_port

_PORTS_FROM, _NUM_PORTS = 20_000, 12_000
"""Below the ports that Linux gives to outgoing connections."""
_ENTRY = re.compile(r"([^\[\],]+)(?:\[([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\])?([^\[\],]*)")


def ranks_in_slurm(environment: Mapping[str, str]) -> Ranks | None:
    """Return the rank that srun gave this process; None if srun did not start it, or started it alone."""
    if not has(environment, "SLURM_PROCID") or _is_batch_script(environment):
        return None
    name = "SLURM_STEP_NUM_TASKS" if has(environment, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = read_number(environment, name, low=1, default=1)
    if size == 1:
        return None
    rank = read_number(environment, "SLURM_PROCID", high=size - 1)
    num_nodes = read_number(environment, "SLURM_STEP_NUM_NODES", low=1, default=0) or read_number(
        environment, "SLURM_NNODES", low=1, default=1
    )
    local_rank = read_number(environment, "SLURM_LOCALID", high=size - 1, default=0)
    return Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_tasks_on_node(environment, size=size, num_nodes=num_nodes, local_rank=local_rank),
        node_rank=read_number(environment, "SLURM_NODEID", default=0),
        num_nodes=num_nodes,
        host=socket.gethostname(),
        master_addr=_master(environment),
        master_port=read_port(environment, "MASTER_PORT", default=_port_of_job(environment)),
        serves_store=rank == 0,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a node list such as `gpu[003-005,9],login1`."""
    # A comma inside brackets separates numbers, every other one separates hosts.
    entries = [_ENTRY.fullmatch(entry.strip()) for entry in re.split(r",(?![^\[]*\])", nodes)]
    match = entries[0]
    if match is None or None in entries:
        raise UserError(
            f"{shown(nodes)} is not a list of SLURM nodes (SLURM_JOB_NODELIST).",
            do="set MASTER_ADDR to the address of the first machine",
        )
    before, numbers, after = match.groups()
    number = re.split("[,-]", numbers)[0] if numbers else ""
    return f"{before}{number}{after}"


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Return whether this is the script of sbatch, which has SLURM_PROCID 0 without being one of several tasks."""
    return has(environment, "SLURM_JOB_ID") and not has(environment, "SLURM_STEP_ID")


def _master(environment: Mapping[str, str]) -> str:
    if has(environment, "MASTER_ADDR"):
        return read_address(environment, "MASTER_ADDR")
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if has(environment, name):
            return first_host(environment[name])
    raise UserError(
        "srun started this process, but SLURM_JOB_NODELIST is not set.",
        why="the process cannot know on which machine the first one is.",
        do="set MASTER_ADDR to the address of that machine",
    )


def _port_of_job(environment: Mapping[str, str]) -> int:
    """Return a port that all processes of a job compute alike and other jobs are unlikely to use."""
    job = read_number(environment, "SLURM_JOB_ID", high=2**40, default=0)
    step = read_number(environment, "SLURM_STEP_ID", high=2**40, default=0)
    return _PORTS_FROM + (job * 7 + step) % _NUM_PORTS


def _tasks_on_node(environment: Mapping[str, str], *, size: int, num_nodes: int, local_rank: int) -> int:
    """Return the number of tasks on this node; SLURM gives it for all nodes, such as `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for entry in text.replace(" ", "").split(",") if text.strip() else []:
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", entry)
        if match is None:
            raise UserError(
                f"SLURM_TASKS_PER_NODE cannot be {shown(text)} (an environment variable).",
                do="srun sets it to counts such as 4(x2),3",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = read_number(environment, "SLURM_NODEID", default=0)
    found = counts[node] if node < len(counts) else -(-size // num_nodes)
    return max(found, local_rank + 1)
