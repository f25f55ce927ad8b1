"""SLURM: write a batch script that starts one launcher per machine, and requeues itself when it is preempted."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USER_MUST_ACT, UserError
from crosstune.distributed.jobs.job import RANK_VARIABLES, Job, Started
from crosstune.distributed.jobs.option import BEFORE, CPUS, MEMORY, JobOption, matches

_WORD = matches(r"[^\s\"'\\#`$;]+", "a word without spaces, quotes, backslashes, and none of # ` $ ;")
PARTITION = JobOption(name="partition", metavar="NAME", text="partition of the cluster", check=_WORD)
ACCOUNT = JobOption(name="account", metavar="NAME", text="account to charge", check=_WORD)
QOS = JobOption(name="qos", metavar="NAME", text="quality of service", check=_WORD)
CONSTRAINT = JobOption(
    name="constraint", metavar="FEATURE", text="features the machines must have", check=_WORD
)
TIME = JobOption(
    name="time",
    metavar="LIMIT",
    text="time limit of one start, such as 4:00:00; the job continues after it",
    check=matches(
        r"[0-9]+(-[0-9]+(:[0-9]+){0,2}|(:[0-9]+){0,2})", "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
    ),
)
GRACE = JobOption(
    name="grace",
    metavar="SECONDS",
    text="how long before the time limit the run saves and stops (default: 120)",
    type=int,
    low=10,
    high=3600,
    default=120,
)
LOGS = JobOption(
    name="logs",
    metavar="FOLDER",
    text="folder for the logs (default: the current one)",
    type=Path,
)
SBATCH = JobOption(
    name="sbatch",
    metavar="KEY=VALUE",
    text="any other option of sbatch, such as reservation=night (may be repeated)",
    repeats=True,
    check=matches(
        r"[a-z][a-z-]*(=[^\s\"'\\#`$;]+)?", "the long name of an sbatch option, and =VALUE if it takes one"
    ),
)
OPTIONS = (PARTITION, ACCOUNT, QOS, CONSTRAINT, TIME, GRACE, CPUS, MEMORY, LOGS, BEFORE, SBATCH)

_BODY = r"""
set -u
cd {folder} || exit {user_must_act}
{before}unset {rank_variables}
export {variables}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
# A port of this start's own: another job, or the start before, may still hold another one.
MASTER_PORT=$((20000 + (SLURM_JOB_ID * 8 + ${{SLURM_RESTART_COUNT:-0}}) % 12000))
export MASTER_ADDR MASTER_PORT

train=(
{train}
)

signalled=
pass_on() {{
  signalled=1
  kill -USR1 "$step" 2>/dev/null
}}
trap pass_on USR1

# One launcher per machine. A machine that ends first leaves the others a minute to end in order.
srun --ntasks-per-node=1 {cpus}--kill-on-bad-exit=0 --wait=60 --open-mode=append --output={node_log} \
  bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' node "${{train[@]}}" &
step=$!
while true; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break # otherwise a signal interrupted the wait
done

# {stopped_code}: stopped by a signal after saving a checkpoint. A job that its user cancelled is not RUNNING any more.
state=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
if [ "$state" = RUNNING ] && {again}; then
  echo "stopped with code $code; requeued, and continues from its newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
  exit {stopped_code}
fi
exit "$code"
"""


def check(job: Job) -> list[UserError]:
    """Return the problems of a job that the options alone do not show."""
    try:
        _directives(job)
    except UserError as error:
        return [error]
    return []


def write(job: Job) -> str:
    """Return the batch script of a job."""
    lines = ["#!/bin/bash", *(f"#SBATCH --{directive}" for directive in _directives(job))]
    stopped = f'[ "$code" -eq {EXIT_STOPPED} ]'
    signalled = f'[ -n "$signalled" ] && [ "$code" -ne {EXIT_DONE} ] && [ "$code" -ne {EXIT_USER_MUST_ACT} ]'
    body = _BODY.format(
        folder=shlex.quote(str(job.folder)),
        user_must_act=EXIT_USER_MUST_ACT,
        before="".join(f"{line}\n" for line in job.options[BEFORE.name]),
        rank_variables=" ".join(RANK_VARIABLES),
        variables=" ".join(f"{name}={value}" for name, value in job.variables().items()),
        train=_command_lines(job.command()),
        cpus=f"--cpus-per-task={job.options[CPUS.name]} "
        if job.options[CPUS.name]
        else "",  # srun does not inherit it
        node_log=shlex.quote(_log(job, "%j-node%n.log")),
        stopped_code=EXIT_STOPPED,
        # With a time limit of its own, the run ends with the same code and is not to be continued.
        again=f"{{ {signalled}; }}" if job.has_time_limit else f"{{ {stopped} || {{ {signalled}; }}; }}",
    )
    return "\n".join(lines) + "\n" + body


def start(job: Job) -> Started:
    """Submit a job to sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "Cannot submit the job: there is no sbatch on this machine.",
            do="run this on a login node of the cluster, or add --print and submit the script there with sbatch",
        )
    if (logs := job.options[LOGS.name]) is not None:
        (job.folder / logs).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=write(job),
        text=True,
        capture_output=True,
        check=False,
        cwd=job.folder,
    )
    if done.returncode:
        raise UserError(
            "sbatch refused the job.",
            why=done.stderr.strip() or f"exit code {done.returncode}",
            do="change the option that it names; `sinfo` lists partitions and limits, and --print shows the script",
        )
    number = done.stdout.strip().partition(";")[0]
    return Started(
        lines=(
            f"submitted job {number}: {job.num_nodes} x {job.num_local} processes, run {job.name}",
            f"state     squeue --job {number}",
            f"progress  tail -F {shlex.quote(_log(job, f'{number}-node0.log'))}",
            f"stop      scancel --batch --signal=USR1 {number}   (saves, and is queued again)",
            f"cancel    scancel {number}",
        )
    )


def _directives(job: Job) -> list[str]:
    chosen = job.options
    found = [
        f"job-name={_job_name(job)}",
        f'chdir="{_plain_path(job.folder)}"',
        f"nodes={job.num_nodes}",
        "ntasks-per-node=1",
        *(
            f"{name}={chosen[name]}"
            for name in ("partition", "account", "qos", "constraint", "time")
            if chosen[name]
        ),
        *((f"gpus-per-node={job.num_gpus}",) if job.num_gpus else ()),
        *((f"cpus-per-task={chosen[CPUS.name]}",) if chosen[CPUS.name] else ()),
        *((f"mem={chosen[MEMORY.name]}",) if chosen[MEMORY.name] else ()),
        f'output="{_log(job, "%j.out")}"',
        "open-mode=append",
        "requeue",
        f"signal=B:USR1@{chosen[GRACE.name]}",
    ]
    return [*found, *chosen[SBATCH.name]]


def _job_name(job: Job) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", job.name).strip("-")[:64] or "crosstune"


def _log(job: Job, ending: str) -> str:
    folder = job.options[LOGS.name]
    return str((_plain_path(folder) if folder is not None else Path()) / f"{_job_name(job)}-{ending}")


def _plain_path(path: Path) -> Path:
    """Return a path that sbatch reads as it is: it expands % and takes quotes and backslashes for its own."""
    if re.search(r"[%\"'\\#\n\r]", str(path)) or not str(path).isprintable():
        raise UserError(
            f"The folder {path} cannot be written into a batch script.",
            why="its name has a quote, a backslash, % or #.",
            do="work in a folder with a plain name",
        )
    return path


def _command_lines(command: list[str]) -> str:
    """Return the words of a command for a bash array, an option and its value per line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return "\n".join(f"  {shlex.join(line)}" for line in lines)
