"""ssh: start each node's launcher over ssh and supervise it, or print the lines to type."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from crosstune.core.errors import EXIT_USER_MUST_ACT, UserError, raise_all, shown
from crosstune.distributed.jobs.attached import AttachedProcess
from crosstune.distributed.jobs.job import (
    BEFORE,
    PORT,
    RANK_VARIABLES,
    RESTARTS,
    Job,
    JobOption,
    Started,
    matches,
)
from crosstune.distributed.jobs.nodes import LOST, run_nodes
from crosstune.files.plain_files import UnreadableFile, read_plain_text

HOSTS = JobOption(
    "hosts", "A,B,...", "nodes, as [user@]host[:port] or names of ~/.ssh/config, separated by commas"
)
HOSTFILE = JobOption("hostfile", "FILE", "file with one node per line", type=Path)
ADDRESS = JobOption(
    "master_addr",
    "ADDRESS",
    "address of node 0 for the others (default: its name in --hosts)",
    check=matches(r"[A-Za-z0-9][A-Za-z0-9.:_-]*", "a host name or an IP address"),
)
OPTIONS = (HOSTS, HOSTFILE, ADDRESS, PORT, BEFORE, RESTARTS)

_HOST = re.compile(
    r"(?:[A-Za-z0-9_][\w.-]*@)?(?P<name>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
# Without password prompts: their text would not be seen. A connection that hangs ends after a minute.
_WORDS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")
LOGIN_S = 20
"""Seconds for a node to answer."""
_MOST_AT_ONCE = 256
"""Logins at the same time."""
NUM_LINES = 15
_HOSTS_LIMIT = 2**20


def check(job: Job) -> Iterator[UserError]:
    """Reject a job without nodes, or with the wrong number of nodes."""
    if (job.options["hosts"] is None) == (job.options["hostfile"] is None):
        yield UserError(
            "--on ssh needs a list of nodes.",
            do="pass either --hosts first,second,..., or --hostfile with one host per line",
        )
        return
    try:
        hosts = _hosts(job)
    except UserError as error:
        yield error
        return
    for host in hosts:
        if not _HOST.fullmatch(host):
            yield UserError(
                f"{shown(host)} is not a valid host.",
                do="write [user@]host[:port], or a name of ~/.ssh/config",
            )
    if len(hosts) != job.num_nodes:
        yield UserError(
            f"--nnodes is {job.num_nodes}, but {len(hosts)} node{'s are' if len(hosts) != 1 else ' is'} listed.",
            do="list as many nodes as --nnodes",
        )


def write(job: Job) -> str:
    """Return the lines to type, one terminal each."""
    lines = [f"# {job.num_nodes} nodes: type each line in a separate terminal. They wait for each other."]
    if job.num_nodes > 1:
        lines.append("# Ctrl-C in any of them stops the run with a checkpoint; the same lines continue it.")
    for place, host in enumerate(_hosts(job)):
        lines.append(shlex.join(["ssh", "-t", *_target(host), _remote(job, place)]))
    return "\n".join(lines) + "\n"


def start(job: Job) -> Started:
    """Start the launchers of all nodes, and wait for them to exit."""
    if shutil.which("ssh") is None:
        raise UserError(
            "Cannot start the job: ssh was not found on this machine.",
            do="install an ssh client, or add --print and type the lines on a machine that has one",
        )
    print(f"logging in to {job.num_nodes} nodes ...", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, job.num_nodes)) as pool:
        found = pool.map(lambda host: _login_problem(job, host), _hosts(job))
        raise_all([problem for problem in found if problem is not None])
    return run_nodes(
        lambda stopped: [_SshNode(job, place, host) for place, host in enumerate(_hosts(job))],
        restarts=job.options["restarts"],
    )


def _login_problem(job: Job, host: str) -> UserError | None:
    """Log in to a node: an unreachable one would otherwise count as lost and be restarted."""
    command = ["ssh", *_WORDS, f"-oConnectTimeout={LOGIN_S}", *_target(host)]
    command.append(f"cd {shlex.quote(str(job.folder))}")
    quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    try:
        done = subprocess.run(command, text=True, errors="replace", timeout=3 * LOGIN_S, check=False, **quiet)
        code, why = done.returncode, " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        code, why = LOST, f"the login was not complete after {3 * LOGIN_S} s."
    if code == LOST:
        return UserError(
            f"ssh cannot log in to {host}.",
            why=why,
            do=f"make `{shlex.join(['ssh', *_target(host), 'true'])}` work without a prompt: check the host's name, "
            "address and key in ~/.ssh/config",
        )
    if code:
        return UserError(
            f"{host} does not have the folder {job.folder}.",
            why=why,
            do="start the run in a folder that all nodes share under the same path",
        )
    return None


class _SshNode(AttachedProcess):
    """The launcher of one node, over ssh. The output of node 0 is shown."""

    def __init__(self, job: Job, place: int, host: str) -> None:
        self.host = host
        # In a new session: Ctrl-C reaches it through us.
        command = ["ssh", *_WORDS, *_target(host), _remote(job, place, attached=True)]
        super().__init__(command, shown=place == 0, max_lines=NUM_LINES, start_new_session=True)


def _hosts(job: Job) -> list[str]:
    if (file := job.options["hostfile"]) is None:
        return [host.strip() for host in (job.options["hosts"] or "").split(",") if host.strip()]
    try:
        lines = read_plain_text(file, limit=_HOSTS_LIMIT).splitlines()
    except UnreadableFile as error:
        raise UserError(
            f"Cannot read the list of nodes {file} (--hostfile).",
            why=error.why,
            do="pass a text file with one [user@]host[:port] per line, or --hosts first,second",
        ) from error
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def _target(host: str) -> list[str]:
    """Return the words of ssh for a node: its port, and `user@host`."""
    match = _HOST.fullmatch(host)
    assert match is not None, "check() rejects other names"
    name = host[: match.end("name")].replace("[", "").replace("]", "")
    return [*(("-p", match["port"]) if match["port"] else ()), name]


def _remote(job: Job, place: int, *, attached: bool = False) -> str:
    """Return the command for the shell of one node."""
    address = job.options["master_addr"] or _target(_hosts(job)[0])[-1].rpartition("@")[2]
    variables = job.variables(node=place) | {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(job.options["master_port"]),
    }
    command = job.command()
    if attached:
        command = [command[0], "-m", "crosstune.distributed.jobs.attached", *command]
    words = ["env", *(word for name in RANK_VARIABLES for word in ("-u", name))]
    words += [f"{name}={value}" for name, value in variables.items()]
    folder, run = shlex.quote(str(job.folder)), f"exec {shlex.join([*words, *command])}"
    if before := job.options["before"]:
        return "\n".join([f"cd {folder} || exit {EXIT_USER_MUST_ACT}", *before, run])
    return f"cd {folder} && {run}"
