"""A training of two processes over a real sshd of this machine, one of which is killed with its connection."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from clusters import (
    NUM_STEPS,
    PAUSE_S,
    flags,
    kill_tree,
    killed_at_the_end,
    launch,
    numbers,
    straight,
    training,
    wait_until,
    write_sums,
)
from injection.pacing import paced

from crosstune.distributed.master import free_ports

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SSHD is None or sys.platform != "linux", reason="no sshd here: apt-get install openssh-server"
    ),
]
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
# What a user has in ~/.ssh/config; `ssh` on the path reads this one instead.
CLIENT = """
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""


@dataclass(frozen=True)
class Machines:
    """Two addresses of this machine, with a Python that finds the same packages after a login."""

    folder: Path
    port: int
    daemon: subprocess.Popen[bytes]

    @property
    def words(self) -> list[str]:
        user = getpass.getuser()
        hosts = ",".join(f"{user}@127.0.0.{number}:{self.port}" for number in (1, 2))
        return ["--on", "ssh", "--nnodes", "2", "--hosts", hosts, "--python", str(self.folder / "python")]

    def sessions(self, node: int) -> list[psutil.Process]:
        """The processes that sshd has started for one machine: a session of its own each."""
        return [
            process
            for process in psutil.Process(self.daemon.pid).children()
            if any(f"NODE_RANK={node}" in _environment(child) for child in process.children(recursive=True))
        ]


def _environment(process: psutil.Process) -> str:
    try:
        return "\n".join(f"{name}={value}" for name, value in process.environ().items()) + "\n"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


@pytest.fixture
def machines() -> Iterator[Machines]:
    assert SSHD is not None
    with tempfile.TemporaryDirectory(prefix="sshd-") as name:
        folder, [port] = Path(name), free_ports(1)
        for key in ("host_key", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
            )
        (folder / "sshd_config").write_text(CONFIG.format(port=port, folder=folder))
        (folder / "config").write_text(CLIENT.format(folder=folder))
        kept = {"OMP_NUM_THREADS": "1", **paced(PAUSE_S)}
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in kept.items())
        _program(folder / "python", f'{exports}exec {shlex.quote(sys.executable)} "$@"')
        (folder / "bin").mkdir()
        _program(folder / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {folder}/config "$@"')
        Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None  # for privilege separation
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=subprocess.STDOUT
            )
        with killed_at_the_end([daemon]):
            wait_until(lambda: _listens(port), what="sshd", log=folder / "log")
            yield Machines(folder=folder, port=port, daemon=daemon)


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_machine_that_dies_is_started_again_and_the_run_is_the_same(
    machines: Machines, tiny_model: Path, tmp_path: Path
) -> None:
    options = training(tiny_model, write_sums(tmp_path / "sums.jsonl"))
    asked = [*machines.words, *flags(options)]
    path = f"{machines.folder}/bin:{os.environ['PATH']}"
    log = tmp_path / "launch.log"
    broken = launch([*asked, "--name", "broken"], folder=tmp_path, log=log, PATH=path)
    with killed_at_the_end([broken]):
        run = tmp_path / "runs" / "broken"
        wait_until(lambda: len(numbers(run)) >= 12 or broken.poll() is not None, what="step 12", log=log)
        assert broken.poll() is None, log.read_text()
        [session] = machines.sessions(1)
        kill_tree(session.pid)
        assert broken.wait() == 0, log.read_text()
    said = log.read_text()
    assert "node 1 of 2" in said and "was lost" in said and "of 3 times)" in said and "resumed" in said
    assert numbers(run) == straight(options, tmp_path)
    assert len(numbers(run)) == NUM_STEPS
