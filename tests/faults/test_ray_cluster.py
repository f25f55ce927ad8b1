"""A training of two processes on a real Ray cluster of two nodes, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the addresses 127.0.0.2, ..."),
]
pytest.importorskip("ray", reason="the ray extra is not installed: run `make clusters`")
NUM_NODES = 2


@dataclass
class RayCluster:
    """A head at 127.0.0.1, and nodes at 127.0.0.2, 127.0.0.3, ... of this machine."""

    folder: Path
    port: int
    nodes: list[subprocess.Popen[bytes]]
    num_added: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, *, num_cpus: int) -> None:
        number, self.num_added = self.num_added, self.num_added + 1
        words = ["start", "--node-ip-address", f"127.0.0.{number + 1}", "--num-cpus", str(num_cpus)]
        words += ["--object-store-memory", "80000000", "--block"]
        if number == 0:
            # Ray puts sockets below this folder, whose paths may have 107 characters.
            words += ["--head", "--port", str(self.port), "--include-dashboard", "false"]
            words += ["--temp-dir", str(self.folder)]
        else:
            words += ["--address", self.address]
        log = (self.folder / f"node-{number}.log").open("wb")
        command = [sys.executable, "-m", "ray.scripts.scripts", *words]
        environment = {**os.environ, **paced(PAUSE_S), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self.nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
        wait_until(lambda: self.size() == len(self.nodes), what=f"node {number}")

    def kill(self, place: int) -> None:
        """Kill a node with all that runs on it."""
        node = self.nodes.pop(place)
        kill_tree(node.pid)
        node.wait()

    def size(self) -> int:
        code = f"import ray; ray.init({self.address!r}, log_to_driver=False); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        started = RayCluster(folder=Path(name), port=free_ports(1)[0], nodes=[])
        with killed_at_the_end(started.nodes):
            started.add(num_cpus=1)
            yield started


def test_a_killed_node_is_replaced_and_the_run_is_the_same(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    cluster.add(num_cpus=1)
    asked = ["--on", "ray", "--address", cluster.address, "--nnodes", str(NUM_NODES)]
    options = training(tiny_model, write_sums(tmp_path / "sums.jsonl"))
    asked += flags(options)
    log = tmp_path / "launch.log"

    broken = launch([*asked, "--name", "broken"], folder=tmp_path, log=log)
    with killed_at_the_end([broken]):
        run = tmp_path / "runs" / "broken"
        wait_until(lambda: len(numbers(run)) >= 12 or broken.poll() is not None, what="step 12", log=log)
        assert broken.poll() is None, log.read_text()
        cluster.kill(1)
        cluster.add(num_cpus=1)
        assert broken.wait() == 0, log.read_text()
    said = log.read_text()
    assert "was lost" in said and "of 3 times)" in said and "resumed" in said
    assert numbers(run) == straight(options, tmp_path)
    assert len(numbers(run)) == NUM_STEPS


def test_waiting_for_room_is_said_and_can_be_stopped(cluster: RayCluster, tmp_path: Path) -> None:
    log = tmp_path / "launch.log"
    asked = ["--on", "ray", "--address", cluster.address, "--nnodes", "5", "--gpus", "8"]
    waiting = launch(asked, folder=tmp_path, log=log)
    with killed_at_the_end([waiting]):
        wait_until(lambda: "waiting for 5 bundles" in log.read_text(), what="the wait", log=log)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() == 130
    assert "'GPU': 8.0" in log.read_text() and "stopped before it was started" in log.read_text()
