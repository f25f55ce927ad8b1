"""Read from environment variables the rank of this process, or the processes to start on this machine."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, shown
from crosstune.distributed.master import is_loopback
from crosstune.files.json_files import JSON_LIMIT, parse_json
from crosstune.files.plain_files import UnreadableFile, read_plain_text
from crosstune.process.ranks import Ranks

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


MOST_PROCESSES = 2**20
_ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


def has(environment: Mapping[str, str], name: str) -> bool:
    """Return whether the variable is set to more than white space."""
    return bool(environment.get(name, "").strip())


def read_number(
    environment: Mapping[str, str],
    name: str,
    *,
    low: int = 0,
    high: int = MOST_PROCESSES,
    default: int | None = None,
) -> int:
    """Return an integer from `low` to `high`; the default where the variable is not set."""
    if default is not None and not has(environment, name):
        return default
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UserError(
            f"{name} cannot be {shown(environment[name])} (an environment variable).",
            do=f"set it to an integer from {low} to {high}, as the program that starts the processes does, or unset it",
        )
    return int(text)


def read_port(environment: Mapping[str, str], name: str, *, default: int) -> int:
    return read_number(environment, name, low=1, high=65535, default=default)


def read_address(environment: Mapping[str, str], name: str) -> str:
    """Return a host name or an address without its port."""
    text = environment[name].strip()
    if _ADDRESS.fullmatch(text) is None or text.count(":") == 1:
        raise UserError(
            f"{name} cannot be {shown(environment[name])} (an environment variable).",
            do="set it to the name or address of the first machine, such as 10.0.0.1, without a port",
        )
    return text


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
