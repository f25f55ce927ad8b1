"""Make a job from the arguments of `crosstune launch`, and report all of its problems at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.names import load_plugin, plugin_names
from crosstune.core.secrets import holds_secret
from crosstune.distributed.jobs.job import Job, check_request, restartable_flags
from crosstune.distributed.jobs.option import COMMON, JobOption

SCHEDULERS = "crosstune.distributed.jobs.schedulers"


def scheduler_names() -> list[str]:
    return plugin_names(SCHEDULERS)


def load_scheduler(name: str) -> ModuleType:
    return load_plugin(SCHEDULERS, name, kind="scheduler")


def options_of_schedulers() -> dict[JobOption, list[str]]:
    """Return each option with its schedulers."""
    found = {option: scheduler_names() for option in COMMON}
    for name in scheduler_names():
        for option in load_scheduler(name).OPTIONS:
            found.setdefault(option, []).append(name)
    return found


def make_job(
    scheduler: str,
    given: Mapping[str, Any],
    *,
    config: Config,
    words: Sequence[str],
    name: str,
    folder: Path,
    file: Path | None = None,
) -> Job:
    """Return the job; raise one ConfigError with all problems."""
    problems: list[UserError] = []
    taken = load_scheduler(scheduler).OPTIONS
    values: dict[str, Any] = {}
    for option, names in options_of_schedulers().items():
        raw = given.get(option.name)
        if raw is not None and scheduler not in names:
            problems.append(
                UserError(
                    f"--{option.name} is an option of {' and '.join(names)}.",
                    do=f"leave it out with --on {scheduler}",
                )
            )
        elif scheduler in names:
            try:
                values[option.name] = option.read(raw)
            except UserError as error:
                problems.append(error)
    raise_all(problems)
    num_gpus, num_local = values["gpus"], values["nproc_per_node"]
    if num_gpus is None:
        num_gpus = 0 if config.backend == "cpu" else num_local or 1
    text = file.read_text(encoding="utf-8") if file is not None else ""  # load_config has read it before
    if holds_secret(text):
        problems.append(
            UserError(
                f"{file} holds a password or an access token.",
                do="set it as an environment variable of the machines instead",
            )
        )
    job = Job(
        name=name,
        num_nodes=values["nnodes"],
        num_local=num_local or num_gpus or 1,
        num_gpus=num_gpus,
        flags=restartable_flags(config, words, name=name),
        python=values["python"],
        folder=folder,
        config_text=text,
        config_file=file,
        has_time_limit=config.time_limit is not None,
        options={option.name: values[option.name] for option in taken},
    )
    problems += _check_devices(job, config)
    problems += check_request(config, size=job.num_nodes * job.num_local)
    problems += load_scheduler(scheduler).check(job)
    raise_all(problems)
    return job


def _check_devices(job: Job, config: Config) -> list[UserError]:
    if config.backend == "cpu" and job.num_gpus:
        return [
            UserError(
                f"--gpus {job.num_gpus} does not go with --backend cpu.",
                why="the job would reserve GPUs that it does not use.",
                do=f"leave --gpus out, and give --nproc_per_node {job.num_local} for the processes of each machine",
            )
        ]
    if job.num_gpus == 0 or job.num_gpus >= job.num_local:
        return []
    return [
        UserError(
            f"--gpus {job.num_gpus} is too few for --nproc_per_node {job.num_local}.",
            why="each process needs its own GPU.",
            do="give as many GPUs as processes, or --gpus 0 for processors only",
        )
    ]
