"""The batch script on a real SLURM of this machine, with two nodes: signalled, preempted, requeued, cancelled."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clusters import (
    NUM_STEPS,
    PAUSE_S,
    flags,
    killed_at_the_end,
    numbers,
    straight,
    training,
    wait_until,
    write_sums,
)
from injection.pacing import paced

from crosstune.distributed.master import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd")
NUM_NODES = 2
MISSING = [
    name
    for name in (*DAEMONS, "sbatch")
    if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)} here: apt-get install slurmctld slurmd slurm-client munge",
    ),
]
# A credential that expires soon lets a requeued job start soon: SLURM waits until the old one is of no use.
CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=normal Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Slurm:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        environment = {**self.environment, **variables}
        done = subprocess.run(words, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def submit(self, words: list[str], folder: Path, **variables: str) -> str:
        command = f"-m crosstune launch --on slurm --nnodes {NUM_NODES}".split()
        out = self.run(sys.executable, *command, *words, cwd=folder, **variables)
        found = re.search(r"submitted job (\d+)", out)
        assert found is not None, out
        return found[1]

    def ended(self, job: str) -> bool:
        waiting = ("PENDING", "RUNNING", "COMPLETING", "PREEMPTED", "CONFIGURING")
        return self.field(job, "JobState") not in waiting


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # munged wants a folder that others cannot write to, and a short path for its socket.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        started = Slurm(folder)
        daemons: list[subprocess.Popen[bytes]] = []
        with killed_at_the_end(daemons):
            for part in ("munge", "state", "spool-n1", "spool-n2"):
                (folder / part).mkdir(mode=0o700)
            key = folder / "munge" / "key"
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o600)
            folder.chmod(0o755)
            (folder / "munge").chmod(0o755)
            options = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed", "key")]
            options.append(f"--socket={folder}/munge/socket")
            _start(daemons, started, ["munged", "--foreground", "--force", *options])
            wait_until((folder / "munge" / "socket").exists, what="munged")
            text = CONFIG.format(
                host=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                folder=folder,
                ports=free_ports(3),
            )
            (folder / "slurm.conf").write_text(text)
            _start(daemons, started, ["slurmctld", "-D"])
            for node in ("n1", "n2"):
                _start(daemons, started, ["slurmd", "-D", "-N", node])
            wait_until(lambda: _num_idle(started) == 2, what="two idle nodes", log=folder / "slurmctld.out")
            yield started


def _start(daemons: list[subprocess.Popen[bytes]], slurm: Slurm, command: list[str]) -> None:
    found = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
    assert found is not None
    with (slurm.folder / f"{command[0]}.out").open("ab") as log:
        daemons.append(
            subprocess.Popen(
                [found, *command[1:]], env=slurm.environment, stdout=log, stderr=subprocess.STDOUT
            )
        )


def _num_idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-p", "normal", "-t", "idle", "-o", "%D"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


@pytest.fixture(scope="module")
def asked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return training(tiny_model, write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl"))


def test_signalled_preempted_and_requeued_it_is_the_same_run(
    slurm: Slurm, asked: dict[str, Any], tmp_path: Path
) -> None:
    job = slurm.submit([*flags(asked), "--name", "broken"], tmp_path, **paced(PAUSE_S))
    run = tmp_path / "runs" / "broken"
    out = tmp_path / f"broken-{job}.out"

    def at(step: int) -> None:
        wait_until(lambda: len(numbers(run)) >= step, what=f"step {step}", log=out)

    at(6)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as `--signal` does before the time limit
    wait_until(lambda: slurm.field(job, "Restarts") == "1", what="the requeue after USR1", log=out)
    assert "stopped with code 3; requeued" in out.read_text()
    at(14)
    slurm.run(
        "srun", "--partition=urgent", f"--nodes={NUM_NODES}", "--ntasks-per-node=1", "true"
    )  # takes its nodes
    wait_until(lambda: slurm.field(job, "Restarts") == "2", what="the requeue after the preemption", log=out)
    assert out.read_text().count("stopped with code 3; requeued") == 2
    at(22)
    slurm.run("scontrol", "requeue", job)  # without a warning: the run goes back to its last checkpoint
    wait_until(lambda: slurm.ended(job), what="the end of the run", log=out)
    assert slurm.field(job, "JobState") == "COMPLETED", out.read_text()
    assert slurm.field(job, "Restarts") == "3"
    assert numbers(run) == straight(asked, tmp_path)
    assert len(numbers(run)) == NUM_STEPS
    assert (tmp_path / f"broken-{job}-node{NUM_NODES - 1}.log").exists()


def test_a_cancelled_job_does_not_come_back(slurm: Slurm, asked: dict[str, Any], tmp_path: Path) -> None:
    job = slurm.submit([*flags(asked), "--name", "cancelled", "--max_steps", "5000"], tmp_path)
    run = tmp_path / "runs" / "cancelled"
    wait_until(lambda: len(numbers(run)) >= 3, what="step 3", log=tmp_path / f"cancelled-{job}.out")
    slurm.run("scancel", job)
    wait_until(lambda: slurm.ended(job) and _num_idle(slurm) == 2, what="the end of the cancelled job")
    assert slurm.field(job, "JobState") == "CANCELLED" and slurm.field(job, "Restarts") == "0"


def test_sbatch_reads_every_option(slurm: Slurm, asked: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "a folder, with spaces"
    folder.mkdir()
    words = ["--partition", "urgent", "--time", "0:05:00", "--cpus", "1", "--gpus", "0", "--logs", "l o g s"]
    words += ["--sbatch", "comment=hello", "--name", "it's $(one)", "--before", "echo before"]
    job = slurm.submit([*flags(asked), *words, "--max_steps", "2"], folder)
    wait_until(lambda: slurm.ended(job), what="the end")
    log = folder / "l o g s" / f"it-s-one-{job}.out"
    assert slurm.field(job, "JobState") == "COMPLETED", log.read_text()
    assert slurm.field(job, "Partition") == "urgent" and slurm.field(job, "TimeLimit") == "00:05:00"
    assert "before" in log.read_text()
    assert len(numbers(folder / "runs" / "it's $(one)")) == 2
