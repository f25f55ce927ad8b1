"""Start the processes of a command that trains, on a single node or as one of several nodes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from crosstune.backends._host import memory_bytes
from crosstune.cli.terminal.output import WARNING, Output, print_error
from crosstune.config.schema import Config
from crosstune.config.time_limits import limits_of
from crosstune.core.errors import UserError
from crosstune.distributed.environment import Nodes
from crosstune.distributed.launch import launch, ring_environments, torch_environments
from crosstune.files.plain_files import readable_bytes
from crosstune.process.this_process import num_cores

CROWD = 4
"""Warn above this many processes per core."""
RANK_BYTES = 300 << 20
"""Memory that the libraries of a process take at least."""


def num_local_processes(config: Config, nodes: Nodes | None) -> int:
    """Return the number of local processes, from --world_size or the original environment variables."""
    from crosstune.runs.pipeline import num_processes

    if nodes is None:
        return num_processes(config)
    num_nodes, num_local = nodes.num_nodes, nodes.num_local
    if config.world_size > 0 and num_local is None:
        num_local, rest = divmod(config.world_size, num_nodes)
        if rest or not num_local:
            raise UserError(
                f"--world_size {config.world_size} is not divisible by the number of nodes, {num_nodes} (NNODES).",
                do=f"choose a multiple of {num_nodes}, or set NPROC_PER_NODE on each node",
            )
    if config.world_size > 0 and num_local is not None and num_nodes == 1 and config.world_size != num_local:
        raise UserError(
            f"--world_size is {config.world_size}, but NNODES x NPROC_PER_NODE is {num_nodes} x {num_local}.",
            do="remove --world_size, or unset NPROC_PER_NODE",
        )
    return num_processes(config, num_local=num_local if num_local is not None else -1)


def oversubscription_warning(backend: str, num_local: int, *, cores: int) -> str:
    """Return a warning if there are many more processes than cores, otherwise an empty string."""
    if backend != "cpu" or num_local <= CROWD * cores:
        return ""
    return (
        f"{num_local} processes share {cores} cores, and each loads all libraries: {cores} or fewer would train faster "
        "(--world_size)"
    )


def check_memory_of_libraries(num_local: int, *, memory_bytes: int, cores: int) -> None:
    """Raise a UserError if the libraries of all processes do not fit into memory: starting them would halt the machine."""
    if num_local * RANK_BYTES > memory_bytes:
        raise UserError(
            f"{num_local:,} processes do not fit into the memory of this machine.",
            why=f"each loads all libraries, {readable_bytes(RANK_BYTES)} or more, and there are {readable_bytes(memory_bytes)}.",
            do=f"use --world_size {cores}, a process for each core, or fewer",
        )


def start_ranks(arguments: Sequence[str], config: Config, *, nodes: Nodes | None, num_local: int) -> int:
    """Run the same command once per rank, and return the exit code of the run."""
    from crosstune.runs.pipeline import plan_single_process

    command = [sys.executable, "-m", "crosstune", *arguments]
    plan, limits = plan_single_process(config), limits_of(config)
    engine = plan.engine
    check_memory_of_libraries(num_local, memory_bytes=memory_bytes()[0], cores=num_cores())
    if remark := oversubscription_warning(plan.backend.name, num_local, cores=num_cores()):
        Output().line(remark, style=WARNING)
    if engine == "mlx" and nodes is not None and nodes.num_nodes > 1:
        raise UserError(
            "MLX does not support multi-node training with NNODES and NODE_RANK.",
            do="start the processes with mlx.launch",
        )
    outcome = launch(
        command,
        num_local=num_local,
        environments=ring_environments if engine == "mlx" else torch_environments,
        nodes=nodes,
        max_restarts=config.max_restarts,
        connect_s=limits.connect_s,
        collective_s=limits.collective_s,
        port=config.master_port,
        say=print_error,
        note=Output().line,
    )
    if outcome.lines:
        print_error(outcome.lines)
    gc.freeze()  # saves seconds of collecting torch's objects at exit
    return outcome.code
