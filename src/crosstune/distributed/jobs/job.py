"""Describe a multi-node run as a job: read its options, check that it can be restarted, fill its template, submit it.

Each scheduler declares its own options.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from crosstune.config.schema import Config, options_by_name
from crosstune.core.errors import UserError, raise_all, shown
from crosstune.core.names import load_plugin, plugin_names
from crosstune.core.safe_text import holds_secret

Check = Callable[[str], str | None]
"""Return a description of the allowed values; None if the value is allowed."""


@dataclass(frozen=True)
class JobOption:
    """An option of `crosstune launch`."""

    name: str
    metavar: str
    text: str
    type: type = str
    low: int = 1
    high: int = 2**20
    default: Any = None
    repeats: bool = False
    check: Check | None = None

    def read(self, raw: Any) -> Any:
        """Return the parsed value; raise a UserError for a wrong one."""
        if self.repeats:
            return tuple(self._read_one(item) for item in raw or ())
        return self.default if raw is None else self._read_one(raw)

    def _read_one(self, raw: str) -> Any:
        if self.type is int:
            text = raw.strip()
            good = text.isascii() and text.isdigit() and len(text) < 12 and self.low <= int(text) <= self.high
            wanted = None if good else f"an integer from {self.low} to {self.high}"
        elif self.type is Path:
            wanted = None if raw.strip() and raw.isprintable() else "a path"
        else:
            wanted = self.check(raw) if self.check else None
        if wanted is None and holds_secret(raw):
            wanted = "no password or access token: set it as an environment variable of the nodes instead"
        if wanted is not None:
            raise UserError(f"--{self.name} cannot be {shown(raw)}.", do=f"give {wanted}")
        return Path(raw).expanduser() if self.type is Path else self.type(raw)


def matches(pattern: str, wanted: str) -> Check:
    """Return a check that a value matches a regular expression as a whole."""
    compiled = re.compile(pattern)
    return lambda value: None if compiled.fullmatch(value) else wanted


NUM_NODES = JobOption("nnodes", "N", "number of nodes", type=int, high=2**16)
NUM_LOCAL = JobOption(
    "nproc_per_node",
    "M",
    "processes on each node, one per device (default: --gpus, or 1)",
    type=int,
    high=1024,
)
NUM_GPUS = JobOption(
    "gpus",
    "N",
    "GPUs to reserve on each node (default: --nproc_per_node; 0 with --backend cpu)",
    type=int,
    low=0,
    high=1024,
)
PYTHON = JobOption(
    "python",
    "FILE",
    "Python with crosstune on the nodes (default: the one that runs this command; in a container: python)",
    check=lambda value: None if value.strip() and value.isprintable() else "the path of a Python interpreter",
)
CPUS = JobOption("cpus", "N", "CPU cores to reserve on each node", type=int)
MEMORY = JobOption(
    "memory",
    "SIZE",
    "memory to reserve on each node, such as 64G",
    check=matches(r"[1-9][0-9]{0,9}[KMGT]", "a number with K, M, G or T, such as 64G"),
)
RESTARTS = JobOption(
    "restarts",
    "N",
    "restart all processes from the last checkpoint after a failure, up to N times (default: 3)",
    type=int,
    low=0,
    high=1000,
    default=3,
)
PORT = JobOption(
    "master_port",
    "PORT",
    "port on node 0 where the processes meet (default: 29500)",
    type=int,
    high=65535,
    default=29500,
)
BEFORE = JobOption(
    "before",
    "LINE",
    "shell line to run before training, such as `module load cuda` (may be repeated)",
    repeats=True,
    check=lambda value: None if value.strip() and "\n" not in value else "one line of shell",
)
COMMON = (NUM_NODES, NUM_LOCAL, NUM_GPUS, PYTHON)
"""Options of every scheduler."""


SCHEDULERS = "crosstune.distributed.jobs.schedulers"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables that a node's launcher must not inherit."""
ANSWER_S = 120.0
"""Seconds for a command of the scheduler to answer."""
_CHECKPOINT_NAME = re.compile(r"step-\d+/?$|\.tar$")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A multi-node run; each node starts its processes with `crosstune train`."""

    name: str
    """The name of the run, the same at every start."""
    num_nodes: int
    num_local: int = 1
    """Processes on each node."""
    num_gpus: int = 0
    """GPUs on each node."""
    flags: tuple[str, ...] = ()
    """The flags of `crosstune train`."""
    python: str | None = None
    folder: Path = field(default_factory=Path)
    """The working directory of the run, the same on all nodes."""
    config_file: Path | None = None
    config_text: str = ""
    """The content of the run's configuration file."""
    has_time_limit: bool = False
    """True if --time_limit may stop the run early, with the exit code of a stop."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The values of the scheduler's options."""

    def variables(self, *, node: int) -> dict[str, str]:
        """Return the variables of a node's launcher, except MASTER_ADDR and MASTER_PORT."""
        values = {"NNODES": self.num_nodes, "NODE_RANK": node, "NPROC_PER_NODE": self.num_local}
        return {name: str(value) for name, value in values.items()}

    def train_words(self, *, config_file: str | None = None) -> list[str]:
        """Return the words after `crosstune train`; `config_file` is the path on the nodes if it differs."""
        file = config_file or (str(self.config_file.absolute()) if self.config_file else None)
        return [*(("--config", file) if file else ()), *self.flags]

    def command(self, *, python: str | None = None, config_file: str | None = None) -> list[str]:
        words = self.train_words(config_file=config_file)
        return [self.python or python or sys.executable, "-m", "crosstune", "train", *words]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The result of a start: a submitted job, or the end of one that we supervised."""

    code: int = 0
    lines: tuple[str, ...] = ()
    """The outcome, and the commands to follow the job."""
    failed: bool = False
    """True if the lines describe an error."""


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
    values: dict[str, Any] = {}
    for option, names in options_of_schedulers().items():
        raw = given.get(option.name)
        if scheduler in names:
            try:
                values[option.name] = option.read(raw)
            except UserError as error:
                problems.append(error)
        elif raw is not None:
            only = f"--{option.name} is an option of {' and '.join(names)}."
            problems.append(UserError(only, do=f"remove it with --on {scheduler}"))
    raise_all(problems)
    num_gpus, num_local = values["gpus"], values["nproc_per_node"]
    if num_gpus is None:
        num_gpus = 0 if config.backend == "cpu" else num_local or 1
    job = Job(
        name=name,
        num_nodes=values["nnodes"],
        num_local=num_local or num_gpus or 1,
        num_gpus=num_gpus,
        flags=_restartable_flags(config, words, name=name),
        python=values["python"],
        folder=folder,
        config_text=file.read_text(encoding="utf-8") if file is not None else "",
        config_file=file,
        has_time_limit=config.time_limit is not None,
        options=values,
    )
    raise_all([*_problems(job, config), *load_scheduler(scheduler).check(job)])
    return job


def _restartable_flags(config: Config, words: Sequence[str], *, name: str) -> tuple[str, ...]:
    """Return the flags for train with a fixed name and `--resume auto`, unless they specify a run to resume.

    Options from environment variables become flags, because the nodes have a different environment.
    """
    own = {option.env for option in options_by_name().values() if option.env}
    from_shell = [option for option, source in config.sources.items() if source in own]
    added = [word for option in from_shell for word in (f"--{option}", str(getattr(config, option)))]
    if config.resume in ("none", "auto"):
        if config.name is None:
            added += ["--name", name]
        if config.resume == "none":
            added += ["--resume", "auto"]
    return (*words, *added)


def _problems(job: Job, config: Config) -> Iterator[UserError]:
    """Yield the problems of a run that a scheduler may start several times."""
    if holds_secret(job.config_text):
        yield UserError(
            f"{job.config_file} contains a password or an access token.",
            do="set it as an environment variable of the nodes instead",
        )
    if config.backend == "cpu" and job.num_gpus:
        yield UserError(
            f"--gpus {job.num_gpus} cannot be combined with --backend cpu.",
            why="the job would reserve GPUs that it does not use.",
            do=f"remove --gpus, and pass --nproc_per_node {job.num_local} for the processes of each node",
        )
    if 0 < job.num_gpus < job.num_local:
        yield UserError(
            f"--gpus {job.num_gpus} is too few for --nproc_per_node {job.num_local}.",
            why="each process needs its own GPU.",
            do="request as many GPUs as processes, or pass --gpus 0 to train on CPUs",
        )
    size = job.num_nodes * job.num_local
    if config.world_size not in (-1, size):
        yield UserError(
            f"--world_size is {config.world_size}, but --nnodes and --nproc_per_node make {size} processes.",
            do="remove --world_size",
        )
    if config.overwrite:
        yield UserError(
            "--overwrite cannot be combined with launch.",
            why="the scheduler may start the job again, and each start would set the run aside and start over.",
            do="choose a different --name",
        )
    if (config.resume == "none" and "resume" in config.sources) or _CHECKPOINT_NAME.search(config.resume):
        yield UserError(
            f"--resume {config.resume} cannot be combined with launch.",
            why="the scheduler may start the job again, and it must then resume from its newest checkpoint.",
            do="remove --resume, or pass a run folder; `crosstune train --resume` continues an archive or an "
            "older checkpoint on one node",
        )
    if config.backend == "mlx":
        problem = "`crosstune launch` supports torch backends only, not mlx."
        yield UserError(problem, do="start MLX with mlx.launch")
    if config.emulate is not None:
        problem = "`crosstune launch` does not support --emulate."
        yield UserError(problem, do="use `crosstune train --emulate`")


def fill(template: str, **values: Any) -> str:
    """Fill a file of `templates`. Its filters quote text: `sh` for a shell, `yaml` for YAML."""
    environment = Environment(
        loader=PackageLoader("crosstune.distributed.jobs"),
        undefined=StrictUndefined,
        autoescape=False,  # the filters quote
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    quote: Any = functools.partial(yaml.safe_dump, default_style='"', allow_unicode=True, width=math.inf)
    environment.filters |= {"sh": shlex.quote, "yaml": lambda text: quote(text).strip()}
    return environment.get_template(template).render(**values)


def submit(command: Sequence[str], text: str, *, where: str, do: str, cwd: Path | None = None) -> str:
    """Pipe a string into a scheduler's command; return its output. `where` is advice if the command is missing."""
    if shutil.which(command[0]) is None:
        raise UserError(f"Cannot submit the job: {command[0]} was not found on this machine.", do=where)
    print(f"submitting with {command[0]} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", cwd=cwd, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{command[0]} did not answer within {ANSWER_S:g} s.",
            why="it was stopped; the job may have been submitted nevertheless.",
            do="list the jobs of the cluster before you submit it again",
        ) from error
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        raise UserError(f"{command[0]} rejected the job.", why=why, do=do)
    return done.stdout
