"""Read from environment variables the rank of this process, or the processes to start on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.json_files import JSON_LIMIT, parse_json
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.core.ranks import Ranks
from crosstune.distributed.master import is_loopback
from crosstune.distributed.slurm import ranks_in_slurm
from crosstune.distributed.variables import has, read_address, read_number, read_port

LAUNCHER = "CROSSTUNE_LAUNCHER"
"""The variable with the process id of crosstune's own launcher."""
LAUNCH_FOLDER = "CROSSTUNE_LAUNCH_FOLDER"
"""The variable with the private folder of crosstune's own launcher."""
ATTEMPT = "CROSSTUNE_ATTEMPT"
"""The variable with the number of restarts by crosstune's own launcher."""
DEFAULT_PORT = 29500
"""The default port of torchrun."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run, from NNODES, NODE_RANK and NPROC_PER_NODE."""

    num_nodes: int = 1
    node_rank: int = 0
    num_local: int | None = None
    """Processes on this machine; None where NPROC_PER_NODE is not set."""
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def read_ranks(config: Config | None = None) -> Ranks | None:
    """Return the rank of this process; None when it was started alone."""
    return ranks_in(with_options(os.environ, config))


def read_nodes(config: Config | None = None) -> Nodes | None:
    """Return the machines of the run; None if the variables are not set."""
    return nodes_in(with_options(os.environ, config))


def with_options(environment: Mapping[str, str], config: Config | None) -> Mapping[str, str]:
    """Return the variables, with --master_addr and --master_port added."""
    asked = config.options_asked() if config is not None else {}
    options = {name.upper(): str(asked[name]) for name in ("master_addr", "master_port") if name in asked}
    for name, value in options.items():
        if has(environment, name) and environment[name].strip() != value and LAUNCHER not in environment:
            raise UserError(
                f"--{name.lower()} is {value}, but {name} is {environment[name].strip()} (an environment variable).",
                do="leave one of them out",
            )
    return {**options, **environment}


def ranks_in(environment: Mapping[str, str]) -> Ranks | None:
    """Return the rank in these variables; None for a process that was started alone."""
    if environment.get("MLX_RANK"):
        return _ring_ranks(environment)
    if has(environment, "RANK"):
        return _torch_ranks(environment)
    if has(environment, "NNODES") or has(environment, "NPROC_PER_NODE"):
        return None  # for a launcher
    if (ranks := ranks_in_slurm(environment)) is not None:
        return ranks
    if has(environment, "WORLD_SIZE") and read_number(environment, "WORLD_SIZE", low=1) > 1:
        raise UserError(
            f"WORLD_SIZE is {environment['WORLD_SIZE'].strip()}, but RANK is not set.",
            why="the process cannot know which of them it is.",
            do="start the processes with `crosstune train --world_size N` or torchrun, which set both, or unset WORLD_SIZE",
        )
    return None


def nodes_in(environment: Mapping[str, str]) -> Nodes | None:
    """Return the machines in these variables; None if they are not set or the process already has a rank."""
    if has(environment, "RANK") or not (has(environment, "NNODES") or has(environment, "NPROC_PER_NODE")):
        return None
    num_nodes = read_number(environment, "NNODES", low=1, default=1)
    num_local = (
        read_number(environment, "NPROC_PER_NODE", low=1) if has(environment, "NPROC_PER_NODE") else None
    )
    if num_nodes > 1:
        for name, meaning in (
            ("NODE_RANK", "which of them this machine is"),
            ("MASTER_ADDR", "where the first one is"),
        ):
            if not has(environment, name):
                raise UserError(
                    f"NNODES is {num_nodes}, but {name} is not set.",
                    why=f"the process cannot know {meaning}.",
                    do="set NNODES, NODE_RANK (0 on the first machine) and MASTER_ADDR (the address of the first machine) "
                    "on every machine",
                )
    node_rank = read_number(environment, "NODE_RANK", high=num_nodes - 1, default=0)
    if has(environment, "WORLD_SIZE") and num_local is not None:
        size = read_number(environment, "WORLD_SIZE", low=1)
        if size != num_nodes * num_local:
            raise UserError(
                f"WORLD_SIZE is {size}, but NNODES x NPROC_PER_NODE is {num_nodes} x {num_local}.",
                do="unset WORLD_SIZE, or set it to their product",
            )
    addr = read_address(environment, "MASTER_ADDR") if num_nodes > 1 else "127.0.0.1"
    return Nodes(
        num_nodes=num_nodes,
        node_rank=node_rank,
        num_local=num_local,
        master_addr=addr,
        master_port=read_port(environment, "MASTER_PORT", default=DEFAULT_PORT),
    )


def _torch_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Return the rank in the variables of torchrun, crosstune's launcher and schedulers."""
    if not has(environment, "WORLD_SIZE"):
        raise UserError(
            "RANK is set, but WORLD_SIZE is not.",
            why="the process cannot know how many there are.",
            do="start the processes with `crosstune train --world_size N` or torchrun, which set both, or unset RANK",
        )
    size = read_number(environment, "WORLD_SIZE", low=1)
    rank = read_number(environment, "RANK", high=size - 1)
    if size == 1:
        return None
    if not has(environment, "MASTER_ADDR"):
        raise UserError(
            f"This process is rank {rank} of {size}, but MASTER_ADDR is not set.",
            why="it cannot know where the first process is.",
            do="set MASTER_ADDR (and MASTER_PORT) to the address of rank 0 for every process, or use torchrun",
        )
    local_size = _local_size(environment, size)
    num_nodes = read_number(
        environment,
        "GROUP_WORLD_SIZE",
        low=1,
        high=size,
        default=read_number(environment, "NNODES", low=1, default=1),
    )
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() == "True"
    restarts = "TORCHELASTIC_RESTART_COUNT" if has(environment, "TORCHELASTIC_RESTART_COUNT") else ATTEMPT
    return Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=read_number(environment, "LOCAL_RANK", high=local_size - 1, default=rank % local_size),
        local_size=local_size,
        node_rank=_node_rank(environment, rank // local_size),
        num_nodes=num_nodes,
        host=socket.gethostname(),
        launcher=read_number(environment, LAUNCHER, high=2**31) if has(environment, LAUNCHER) else None,
        launch_folder=environment.get(LAUNCH_FOLDER) or None,
        attempt=read_number(environment, restarts, high=2**31, default=0),
        master_addr=read_address(environment, "MASTER_ADDR"),
        master_port=read_port(environment, "MASTER_PORT", default=DEFAULT_PORT),
        serves_store=rank == 0 and not by_agent,
    )


def _local_size(environment: Mapping[str, str], size: int) -> int:
    for name in ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE"):
        if has(environment, name):
            return read_number(environment, name, low=1, high=size)
    if has(environment, "NNODES"):
        return max(1, size // read_number(environment, "NNODES", low=1, high=size))
    return size if is_loopback(environment["MASTER_ADDR"].strip()) else 1


def _node_rank(environment: Mapping[str, str], otherwise: int) -> int:
    for name in ("GROUP_RANK", "NODE_RANK"):
        if has(environment, name):
            return read_number(environment, name)
    return otherwise


def _ring_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Return the rank in an MLX ring, as mlx.launch sets it."""
    hostfile = environment.get("MLX_HOSTFILE")
    if not hostfile:
        raise UserError(
            "This process is one of several, but they do not form a ring.",
            why="MLX_RANK is set, but MLX_HOSTFILE is not.",
            do="start them with mlx.launch --backend ring; to train in one process, unset MLX_RANK",
        )
    hosts = _read_hosts(Path(hostfile))
    if len(hosts) < 2:
        return None
    rank = read_number(environment, "MLX_RANK", high=len(hosts) - 1)
    neighbours = [place for place, host in enumerate(hosts) if host == hosts[rank]]
    return Ranks(
        engine="mlx",
        rank=rank,
        size=len(hosts),
        local_rank=neighbours.index(rank),
        local_size=len(neighbours),
        num_nodes=len(set(hosts)),
        host=socket.gethostname(),
        launcher=read_number(environment, LAUNCHER, high=2**31) if has(environment, LAUNCHER) else None,
        launch_folder=environment.get(LAUNCH_FOLDER) or None,
        attempt=read_number(environment, ATTEMPT, high=2**31, default=0),
    )


def _read_hosts(path: Path) -> list[str]:
    """Return the address of each rank without its port; mlx.launch gives a single process an empty file."""
    try:
        text = read_plain_text(path, limit=JSON_LIMIT)
        found = parse_json(text) if text.strip() else []
        return [str(addresses[0]).rsplit(":", 1)[0] for addresses in found]
    except UnreadableFile as error:
        raise UserError(
            f"Cannot read the host file {path} (MLX_HOSTFILE).",
            why=error.why,
            do="start the processes with mlx.launch, which writes the file, or unset MLX_RANK to train in one process",
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"{path} is not a host file of an MLX ring.",
            why=f"{type(error).__name__}: {error}",
            do='MLX_HOSTFILE is a JSON list of the addresses of each rank, such as [["10.0.0.1:5000"], '
            '["10.0.0.2:5000"]]; mlx.launch writes it',
        ) from error
