"""Read the rank of this process from the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from crosstune.core.errors import UserError, shown
from crosstune.core.json_files import JSON_LIMIT, parse_json
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.core.ranks import Ranks

LAUNCHER = "CROSSTUNE_LAUNCHER"
"""The variable with the process id of crosstune's own launcher."""
_MOST_PROCESSES = 2**20


def read_ranks() -> Ranks | None:
    """Return the rank of this process; None when it was started alone."""
    return ranks_in(os.environ)


def ranks_in(environment: Mapping[str, str]) -> Ranks | None:
    """Return the rank in these variables; None for a process that was started alone."""
    if not environment.get("MLX_RANK"):
        _refuse_torch_ranks(environment)
        return None
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
    rank = _read_number(environment, "MLX_RANK", high=len(hosts) - 1)
    neighbours = [place for place, host in enumerate(hosts) if host == hosts[rank]]
    return Ranks(
        engine="mlx",
        rank=rank,
        size=len(hosts),
        local_rank=neighbours.index(rank),
        local_size=len(neighbours),
        launcher=_read_number(environment, LAUNCHER, high=2**31) if environment.get(LAUNCHER) else None,
    )


def _refuse_torch_ranks(environment: Mapping[str, str]) -> None:
    """Raise a UserError for one of several torch processes, as each would train the whole run."""
    if not environment.get("RANK") or not environment.get("WORLD_SIZE", "").strip():
        return
    size = _read_number(environment, "WORLD_SIZE", high=_MOST_PROCESSES, low=1)
    rank = _read_number(environment, "RANK", high=size - 1)
    if size == 1:
        return
    raise UserError(
        f"This process is rank {rank} of {size} (RANK and WORLD_SIZE are set).",
        why="training on several torch devices is not built yet, and each process would train the whole run.",
        do="start one process without torchrun, or unset RANK and WORLD_SIZE; MLX trains on several machines with mlx.launch",
    )


def _read_number(environment: Mapping[str, str], name: str, *, high: int, low: int = 0) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UserError(
            f"{name} cannot be {shown(environment[name])} (an environment variable).",
            do=f"set it to an integer from {low} to {high}, as the program that starts the processes does, or unset it",
        )
    return int(text)


def _read_hosts(path: Path) -> list[str]:
    """Return the address of each rank without its port; mlx.launch gives a single process an empty file."""
    try:
        text = read_plain_text(path, limit=JSON_LIMIT)
        found = parse_json(text) if text.strip() else []
        return [str(addresses[0]).rsplit(":", 1)[0] for addresses in found]
    except UnreadableFile as error:
        raise UserError(f"Cannot read the host file {path} (MLX_HOSTFILE).", why=error.why) from error
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"{path} is not a host file of an MLX ring.",
            why=f"{type(error).__name__}: {error}",
            do='MLX_HOSTFILE is a JSON list of the addresses of each rank, such as [["10.0.0.1:5000"], '
            '["10.0.0.2:5000"]]; mlx.launch writes it',
        ) from error
