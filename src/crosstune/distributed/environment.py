"""Read the rank of this process, or the nodes of the run, from environment variables.

Ranks come from torchrun, crosstune's launcher (the same variables), srun or mlx.launch. NNODES, NODE_RANK and
NPROC_PER_NODE describe nodes: each node starts its own ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, shown
from crosstune.distributed.master import is_loopback
from crosstune.files.json_files import JSON_LIMIT, parse_json
from crosstune.files.plain_files import UnreadableFile, read_plain_text
from crosstune.process.ranks import Ranks

LAUNCHER, LAUNCH_FOLDER, ATTEMPT = "CROSSTUNE_LAUNCHER", "CROSSTUNE_LAUNCH_FOLDER", "CROSSTUNE_ATTEMPT"
"""Variables with the launcher's process id, its private folder, and the number of its restarts."""
DEFAULT_PORT = 29500
"""The default port of torchrun."""
MAX_PROCESSES = 2**20
_LARGEST_ID = 2**40
_SLURM_PORTS_FROM, _NUM_SLURM_PORTS = 20_000, 12_000
"""Below the ports that Linux gives to outgoing connections."""
_ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")
_SLURM_HOSTS = re.compile(r"([^\[\],]+)(?:\[([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\])?([^\[\],]*)")
_NODE_COUNTS = ("NNODES", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_LOCAL_COUNTS = ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_START_BOTH = "start the processes with `crosstune train --world_size N` or torchrun, which set both"

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, from NNODES, NODE_RANK and NPROC_PER_NODE."""

    num_nodes: int = 1
    node_rank: int = 0
    num_local: int | None = None
    """Processes on this node; None if NPROC_PER_NODE is not set."""
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def read_ranks(config: Config | None = None) -> Ranks | None:
    """Return the rank of this process; None if it was started alone."""
    return ranks_in(with_options(os.environ, config))


def read_nodes(config: Config | None = None) -> Nodes | None:
    """Return the nodes of the run; None if the variables are not set."""
    return nodes_in(with_options(os.environ, config))


def with_options(environment: Environment, config: Config | None) -> Environment:
    """Return the variables, with --master_addr and --master_port added."""
    asked = config.options_asked() if config is not None else {}
    options = {name.upper(): str(asked[name]) for name in ("master_addr", "master_port") if asked.get(name)}
    for name, value in options.items():
        if _has(environment, name) and environment[name].strip() != value and LAUNCHER not in environment:
            raise UserError(
                f"--{name.lower()} is {value}, but {name} is {environment[name].strip()} (an environment variable).",
                do="remove one of them",
            )
    return {**options, **environment}


def ranks_in(environment: Environment) -> Ranks | None:
    """Return the rank in these variables; None if the process was started alone."""
    if environment.get("MLX_RANK"):
        return _ring_ranks(environment)
    if _has(environment, "RANK"):
        return _torch_ranks(environment)
    if _first_set(environment, "NNODES", "NPROC_PER_NODE"):
        return None  # for a launcher
    ranks = _slurm_ranks(environment)
    if ranks is None and (size := _read_number(environment, "WORLD_SIZE", low=1, default=1)) > 1:
        raise UserError(
            f"WORLD_SIZE is {size}, but RANK is not set.", do=f"{_START_BOTH}, or unset WORLD_SIZE"
        )
    return ranks


def nodes_in(environment: Environment) -> Nodes | None:
    """Return the nodes in these variables; None if they are not set or the process already has a rank."""
    if _has(environment, "RANK") or not _first_set(environment, "NNODES", "NPROC_PER_NODE"):
        return None
    num_nodes = _read_number(environment, "NNODES", low=1, default=1)
    num_local = _read_number(environment, "NPROC_PER_NODE", low=1, default=0) or None
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if num_nodes > 1 and not _has(environment, name):
            raise UserError(
                f"NNODES is {num_nodes}, but {name} is not set.",
                do="set NNODES, NODE_RANK (0 on node 0) and MASTER_ADDR (the address of node 0) on every node",
            )
    node_rank = _read_number(environment, "NODE_RANK", high=num_nodes - 1, default=0)
    size = _read_number(environment, "WORLD_SIZE", low=1, default=0)
    if size and num_local and size != num_nodes * num_local:
        raise UserError(
            f"WORLD_SIZE is {size}, but NNODES x NPROC_PER_NODE is {num_nodes} x {num_local}.",
            do="unset WORLD_SIZE, or set it to their product",
        )
    return Nodes(
        num_nodes=num_nodes,
        node_rank=node_rank,
        num_local=num_local,
        master_addr=_read_address(environment, "MASTER_ADDR") if num_nodes > 1 else "127.0.0.1",
        master_port=_read_port(environment),
    )


def _torch_ranks(environment: Environment) -> Ranks | None:
    """Return the rank in the variables of torchrun, crosstune's launcher and schedulers."""
    if not _has(environment, "WORLD_SIZE"):
        raise UserError("RANK is set, but WORLD_SIZE is not.", do=f"{_START_BOTH}, or unset RANK")
    size = _read_number(environment, "WORLD_SIZE", low=1)
    rank = _read_number(environment, "RANK", high=size - 1)
    if size == 1:
        return None
    if not _has(environment, "MASTER_ADDR"):
        if (sign := _sign_of_nodes(environment, size)) is not None:
            raise UserError(
                f"This process is rank {rank} of {size}, but MASTER_ADDR is not set.",
                why=f"{sign} is {environment[sign].strip()}, so the ranks are on several nodes.",
                do="set MASTER_ADDR (and MASTER_PORT) to the address of rank 0 for every process, or use torchrun",
            )
        environment = {**environment, "MASTER_ADDR": "127.0.0.1"}
    local_size = _local_size(environment, size)
    num_nodes = _read_number(environment, "NNODES", low=1, default=1)
    node_rank = _first_set(environment, "GROUP_RANK", "NODE_RANK")
    restarts = _first_set(environment, "TORCHELASTIC_RESTART_COUNT") or ATTEMPT
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() == "True"
    return Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=_read_number(environment, "LOCAL_RANK", high=local_size - 1, default=rank % local_size),
        local_size=local_size,
        node_rank=_read_number(environment, node_rank) if node_rank else rank // local_size,
        num_nodes=_read_number(environment, "GROUP_WORLD_SIZE", low=1, high=size, default=num_nodes),
        host=socket.gethostname(),
        attempt=_read_number(environment, restarts, high=2**31, default=0),
        master_addr=_read_address(environment, "MASTER_ADDR"),
        master_port=_read_port(environment),
        serves_store=rank == 0 and not by_agent,
        **_launcher_fields(environment),
    )


def _sign_of_nodes(environment: Environment, size: int) -> str | None:
    """Return the variable by which a launcher or scheduler places the ranks on several nodes; None without one."""
    for name in _NODE_COUNTS:
        if _read_number(environment, name, low=1, default=1) > 1:
            return name
    for name in _LOCAL_COUNTS:
        if _read_number(environment, name, low=1, default=size) < size:
            return name
    return None


def _local_size(environment: Environment, size: int) -> int:
    if name := _first_set(environment, "LOCAL_WORLD_SIZE", "NPROC_PER_NODE"):
        return _read_number(environment, name, low=1, high=size)
    if _has(environment, "NNODES"):
        return max(1, size // _read_number(environment, "NNODES", low=1, high=size))
    return size if is_loopback(environment["MASTER_ADDR"].strip()) else 1


def _launcher_fields(environment: Environment) -> dict[str, Any]:
    return {
        "launcher": _read_number(environment, LAUNCHER, high=2**31, default=0) or None,
        "launch_folder": environment.get(LAUNCH_FOLDER) or None,
    }


def _ring_ranks(environment: Environment) -> Ranks | None:
    """Return the rank in an MLX ring, as mlx.launch sets it."""
    hostfile = environment.get("MLX_HOSTFILE")
    if not hostfile:
        raise UserError(
            "MLX_RANK is set, but MLX_HOSTFILE is not: the processes do not form a ring.",
            do="start them with mlx.launch --backend ring; to train in one process, unset MLX_RANK",
        )
    hosts = _read_hosts(Path(hostfile))
    if len(hosts) < 2:
        return None
    rank = _read_number(environment, "MLX_RANK", high=len(hosts) - 1)
    neighbors = [place for place, host in enumerate(hosts) if host == hosts[rank]]
    return Ranks(
        engine="mlx",
        rank=rank,
        size=len(hosts),
        local_rank=neighbors.index(rank),
        local_size=len(neighbors),
        num_nodes=len(set(hosts)),
        host=socket.gethostname(),
        attempt=_read_number(environment, ATTEMPT, high=2**31, default=0),
        **_launcher_fields(environment),
    )


def _read_hosts(path: Path) -> list[str]:
    """Return the address of each rank without its port; mlx.launch writes an empty file for a single process."""
    try:
        text = read_plain_text(path, limit=JSON_LIMIT)
        found = parse_json(text) if text.strip() else []
        return [str(addresses[0]).rsplit(":", 1)[0] for addresses in found]
    except (UnreadableFile, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"{path} is not an MLX ring host file (MLX_HOSTFILE).",
            why=error.why if isinstance(error, UnreadableFile) else f"{type(error).__name__}: {error}",
            do='start the processes with mlx.launch, which writes a JSON list such as [["10.0.0.1:5000"], '
            '["10.0.0.2:5000"]], or unset MLX_RANK to train in one process',
        ) from error


def _slurm_ranks(environment: Environment) -> Ranks | None:
    """Return the rank that srun gave this process; None if srun did not start it, or started it alone."""
    # The script of sbatch has SLURM_PROCID 0 too, but no SLURM_STEP_ID.
    is_batch_script = _has(environment, "SLURM_JOB_ID") and not _has(environment, "SLURM_STEP_ID")
    if not _has(environment, "SLURM_PROCID") or is_batch_script:
        return None
    tasks = _first_set(environment, "SLURM_STEP_NUM_TASKS") or "SLURM_NTASKS"
    size = _read_number(environment, tasks, low=1, default=1)
    if size == 1:
        return None
    rank = _read_number(environment, "SLURM_PROCID", high=size - 1)
    nodes = _first_set(environment, "SLURM_STEP_NUM_NODES") or "SLURM_NNODES"
    num_nodes = _read_number(environment, nodes, low=1, default=1)
    node_rank = _read_number(environment, "SLURM_NODEID", default=0)
    local_rank = _read_number(environment, "SLURM_LOCALID", high=size - 1, default=0)
    # All processes of a job compute the same port, and other jobs are unlikely to.
    job = _read_number(environment, "SLURM_JOB_ID", high=_LARGEST_ID, default=0)
    step = _read_number(environment, "SLURM_STEP_ID", high=_LARGEST_ID, default=0)
    return Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(-(-size // num_nodes), local_rank + 1),
        node_rank=node_rank,
        num_nodes=num_nodes,
        host=socket.gethostname(),
        master_addr=_slurm_master(environment),
        master_port=_read_port(environment, default=_SLURM_PORTS_FROM + (job * 7 + step) % _NUM_SLURM_PORTS),
        serves_store=rank == 0,
    )


def _slurm_master(environment: Environment) -> str:
    if _has(environment, "MASTER_ADDR"):
        return _read_address(environment, "MASTER_ADDR")
    name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # `gpu[003-005,9],login1`: a comma inside brackets separates numbers, every other comma separates hosts.
    nodes = environment[name] if name else ""
    entries = [_SLURM_HOSTS.fullmatch(entry.strip()) for entry in re.split(r",(?![^\[]*\])", nodes)]
    match = entries[0]
    if match is None or None in entries:
        raise UserError(
            f"{shown(nodes)} is not a list of SLURM nodes ({name or 'SLURM_JOB_NODELIST'}).",
            do="set MASTER_ADDR to the address of node 0",
        )
    before, numbers, after = match.groups()
    return f"{before}{re.split('[,-]', numbers or '')[0]}{after}"


def _has(environment: Environment, name: str) -> bool:
    """True if the variable is set to more than whitespace."""
    return bool(environment.get(name, "").strip())


def _first_set(environment: Environment, *names: str) -> str | None:
    return next((name for name in names if _has(environment, name)), None)


def _read_number(
    environment: Environment,
    name: str,
    *,
    low: int = 0,
    high: int = MAX_PROCESSES,
    default: int | None = None,
) -> int:
    """Return an integer from `low` to `high`; the default if the variable is not set."""
    if default is not None and not _has(environment, name):
        return default
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        do = f"set it to an integer from {low} to {high}, as the program that starts the processes does, or unset it"
        raise _invalid(environment, name, do)
    return int(text)


def _read_port(environment: Environment, *, default: int = DEFAULT_PORT) -> int:
    return _read_number(environment, "MASTER_PORT", low=1, high=65535, default=default)


def _read_address(environment: Environment, name: str) -> str:
    """Return a host name or an address without its port."""
    text = environment[name].strip()
    if _ADDRESS.fullmatch(text) is None or text.count(":") == 1:
        do = "set it to the name or address of node 0, such as 10.0.0.1, without a port"
        raise _invalid(environment, name, do)
    return text


def _invalid(environment: Environment, name: str, do: str) -> UserError:
    return UserError(f"{name} cannot be {shown(environment[name])} (an environment variable).", do=do)
