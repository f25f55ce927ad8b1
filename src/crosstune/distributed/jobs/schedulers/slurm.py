"""SLURM: a batch script that starts one launcher per node, and requeues itself after a preemption."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USER_MUST_ACT, UserError
from crosstune.distributed.jobs.job import (
    BEFORE,
    CPUS,
    MEMORY,
    RANK_VARIABLES,
    Job,
    JobOption,
    Started,
    fill,
    matches,
    submit,
)

_WORD = matches(r"[^\s\"'\\#`$;]+", "a word without spaces, quotes, backslashes, and none of # ` $ ;")
PARTITION = JobOption("partition", "NAME", "partition of the cluster", check=_WORD)
ACCOUNT = JobOption("account", "NAME", "account to charge", check=_WORD)
QOS = JobOption("qos", "NAME", "quality of service", check=_WORD)
CONSTRAINT = JobOption("constraint", "FEATURE", "features the nodes must have", check=_WORD)
TIME = JobOption(
    "time",
    "LIMIT",
    "time limit of one start, such as 4:00:00; the job is requeued and continues after it",
    check=matches(
        r"[0-9]+(-[0-9]+(:[0-9]+){0,2}|(:[0-9]+){0,2})", "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
    ),
)
GRACE = JobOption(
    "grace",
    "SECONDS",
    "seconds before the time limit at which the run saves and stops (default: 120)",
    type=int,
    low=10,
    high=3600,
    default=120,
)
LOGS = JobOption("logs", "FOLDER", "folder for the logs (default: the current one)", type=Path)
SBATCH = JobOption(
    "sbatch",
    "KEY=VALUE",
    "any other option of sbatch, such as reservation=night (may be repeated)",
    repeats=True,
    check=matches(
        r"[a-z][a-z-]*(=[^\s\"'\\#`$;]+)?", "the long name of an sbatch option, and =VALUE if it needs one"
    ),
)
OPTIONS = (PARTITION, ACCOUNT, QOS, CONSTRAINT, TIME, GRACE, CPUS, MEMORY, LOGS, BEFORE, SBATCH)


def check(job: Job) -> list[UserError]:
    """Reject folders that sbatch would misread: it expands % and interprets quotes and backslashes."""
    return [
        UserError(
            f"The folder {path} cannot be written into a batch script.",
            why="its name has a quote, a backslash, % or #.",
            do="work in a folder with a plain name",
        )
        for path in (job.folder, job.options["logs"])
        if path is not None and (re.search(r"[%\"'\\#\n\r]", str(path)) or not str(path).isprintable())
    ]


def write(job: Job) -> str:
    """Return the batch script."""
    chosen = job.options
    wanted = {name: chosen[name] for name in ("partition", "account", "qos", "constraint", "time")}
    wanted |= {"gpus-per-node": job.num_gpus, "cpus-per-task": chosen["cpus"], "mem": chosen["memory"]}
    return fill(
        "slurm.sh.jinja",
        job=job,
        name=_job_name(job),
        folder=str(job.folder),
        logs=_log(job),
        directives=[*(f"{name}={value}" for name, value in wanted.items() if value), *chosen["sbatch"]],
        rank_variables=RANK_VARIABLES,
        command_lines=_lines(job.command()),
        done=EXIT_DONE,
        stopped=EXIT_STOPPED,
        user_must_act=EXIT_USER_MUST_ACT,
    )


def start(job: Job) -> Started:
    """Submit the job with sbatch."""
    if (logs := job.options["logs"]) is not None:
        (job.folder / logs).mkdir(parents=True, exist_ok=True)
    out = submit(
        ["sbatch", "--parsable"],
        write(job),
        where="run this on a login node of the cluster, or add --print and submit the script there with sbatch",
        do="change the option that it names; `sinfo` lists partitions and limits, and --print shows the script",
        cwd=job.folder,
    )
    number = out.strip().partition(";")[0]
    return Started(
        lines=(
            f"submitted job {number}: {job.num_nodes} x {job.num_local} processes, run {job.name}",
            f"state     squeue --job {number}",
            f"progress  tail -F {shlex.quote(f'{_log(job)}-{number}-node0.log')}",
            f"stop      scancel --batch --signal=USR1 {number}   (saves, and is queued again)",
            f"cancel    scancel {number}",
        )
    )


def _job_name(job: Job) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", job.name).strip("-")[:64] or "crosstune"


def _log(job: Job) -> str:
    """Return the common prefix of the logs' paths."""
    return str((job.options["logs"] or Path()) / _job_name(job))


def _lines(command: list[str]) -> list[list[str]]:
    """Split a command into lines, each with one option and its value."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return lines
