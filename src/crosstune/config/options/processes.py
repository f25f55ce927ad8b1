"""Options for runs of several processes: where they meet, how often they are restarted, how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import SEVERAL_DEVICES, SHARDED_MODEL
from crosstune.config.option import OnResume, check_duration, option


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    master_addr: str = option(
        "localhost",
        "Address of the machine with the first process; overrides nothing that a launcher has set",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.ONE_START | OnResume.FREE,
    )
    master_port: int = option(
        12355,
        "Port on that machine; unset: a free one on a single machine, 29500 on several",
        low=1,
        high=65535,
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.ONE_START | OnResume.FREE,
    )
    max_restarts: int = option(
        3,
        "How often crosstune starts the processes again, from the newest checkpoint, after one was killed or crashed",
        low=0,
        high=10_000,
        needs=(SEVERAL_DEVICES,),
        on_resume=OnResume.FREE,
    )
    connect_timeout: str = option(
        "5m",
        "How long the processes wait for each other at the start",
        needs=(SEVERAL_DEVICES,),
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    collective_timeout: str = option(
        "30m",
        "How long a process may wait in one collective or make no progress; after that the run is ended and the process named",
        needs=(SEVERAL_DEVICES,),
        env="NCCL_TIMEOUT",
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    heartbeat_timeout: str | None = option(
        None,
        "How long NCCL's own watchdog may be silent; unset: as long as --collective_timeout",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        env="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    debug_collectives: bool = option(
        False,
        "Compare operation, shape and dtype of each collective between the processes first: a mismatch is an error at once, "
        "instead of a hang. Slow",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.FREE,
    )
