"""Two machines, as network namespaces with separate addresses, train together through the guides' variables."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from injection import ranks
from injection.bench import Bench

from crosstune.distributed.master import free_ports

pytestmark = pytest.mark.slow
MASTER = "10.213.77.1"
LIMIT_S = 15.0


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("the program `ip` is not installed (iproute2)")
    first, second = (f"ct-{os.getpid()}-{letter}" for letter in "ab")
    made = ip("netns", "add", first)
    if made.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        assert ip("netns", "add", second).returncode == 0
        made = ip(
            "link", "add", "ct-eth", "netns", first, "type", "veth", "peer", "name", "ct-eth", "netns", second
        )
        if made.returncode != 0:
            pytest.skip(f"virtual network devices are not permitted here: {made.stderr.strip()}")
        for number, name in enumerate((first, second), start=1):
            ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", "ct-eth")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "ct-eth", "up")
        yield first, second
    finally:
        for name in (first, second):
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("machines"))


def start(
    bench: Bench,
    machines: tuple[str, str],
    folder: Path,
    *,
    master: str = MASTER,
    before: Sequence[Sequence[str]] = ((), ()),
    **more: Any,
) -> list[tuple[subprocess.Popen[str], Path]]:
    """The same command on both machines; `before` has the words that go before it on each."""
    started = []
    for node, name in enumerate(machines):
        words = bench.words("lora", folder, **ranks.OPTIONS | more)
        variables = {"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "1", "MASTER_ADDR": master}
        said = bench.home / f"{folder.name}-{node}.said"
        command = ["ip", "netns", "exec", name, *before[node], sys.executable, "-m", "crosstune", *words]
        with said.open("w") as file:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        started.append((process, said))
    return started


def mounted(command: str) -> list[str]:
    """Return the words before a program that is to see another file system, which `command` mounts."""
    words = ["unshare", "--mount", "sh", "-c", f'{command} && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not permitted here")
    return words


def with_hosts(text: str, path: Path) -> list[str]:
    path.write_text(f"127.0.0.1 localhost\n{text}\n")
    return mounted(f"mount --bind {path} /etc/hosts")


def ends(started: list[tuple[subprocess.Popen[str], Path]]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(timeout=ranks.LIMIT_S), said.read_text()) for process, said in started]
    finally:
        for process, _ in started:
            process.send_signal(signal.SIGTERM)


def test_two_machines_train_as_one(bench: Bench, machines: tuple[str, str], tmp_path: Path) -> None:
    """Debian gives a machine's own name the address 127.0.1.1; the others know the real one."""
    wanted = ranks.straight(bench, 2, "lora")
    before = [
        with_hosts(f"{address} ct-first", tmp_path / f"hosts-{node}")
        for node, address in enumerate(("127.0.1.1", MASTER))
    ]
    started = start(bench, machines, tmp_path / "two", master="ct-first", before=before)
    (first, said), (second, quiet) = ends(started)
    assert (first, second) == (0, 0), said + quiet
    assert ranks.differences(ranks.read_bits(tmp_path / "two"), wanted) == []
    assert "finished" in said and "joined" not in said
    assert "joined   as node 1 of 2, rank 1 of 2" in quiet and "all processes finished" in quiet


def test_a_node_of_torchrun_says_that_it_joined(bench: Bench, tmp_path: Path) -> None:
    started, [port] = [], free_ports(1)
    for node in range(2):
        variables = {
            "RANK": node,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": node,
        }
        variables |= {"GROUP_WORLD_SIZE": 2, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        said = tmp_path / f"{node}.said"
        words = [sys.executable, "-m", "crosstune", *bench.words("lora", tmp_path / "run", **ranks.OPTIONS)]
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with said.open("w") as file:
            process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, text=True)
        started.append((process, said))
    (first, said), (second, quiet) = ends(started)
    assert (first, second) == (0, 0), said + quiet
    assert "finished" in said and "joined" not in said
    assert quiet.startswith("joined   as node 1 of 2, rank 1 of 2; node 0 (127.0.0.1)")


def test_a_machine_that_takes_itself_for_the_first_is_told(
    bench: Bench, machines: tuple[str, str], tmp_path: Path
) -> None:
    before = [with_hosts("127.0.1.1 ct-first", tmp_path / "hosts")] * 2
    started = start(
        bench, machines, tmp_path / "itself", master="ct-first", before=before, connect_timeout="8s"
    )
    (first, _), (second, said) = ends(started)
    assert (first, second) == (2, 2) and "ct-first is node 0" in said and "127.0.1.1" in said


def test_a_cut_link_ends_both_machines(bench: Bench, machines: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    started = start(bench, machines, folder, max_steps=100_000, collective_timeout=f"{LIMIT_S:g}s")
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert all(process.poll() is None for process, _ in started), [
            said.read_text() for _, said in started
        ]
        time.sleep(0.05)
    cut = time.monotonic()
    ip("-n", machines[0], "link", "set", "ct-eth", "down")
    try:
        (first, said), (second, other) = ends(started)
    finally:
        ip("-n", machines[0], "link", "set", "ct-eth", "up")
    assert (first, second) == (1, 1)
    assert "was lost" in said and "the connection to node 0 at 10.213.77.1" in other
    assert time.monotonic() - cut < LIMIT_S + ranks.LATE_S


def test_a_run_folder_that_is_not_shared_is_refused(
    bench: Bench, machines: tuple[str, str], tmp_path: Path
) -> None:
    """The second machine has another file system at the place of the run folder."""
    folder = tmp_path / "apart" / "run"
    folder.parent.mkdir()
    hidden = mounted(f"mount -t tmpfs none {folder.parent}")
    (first, said), (second, other) = ends(start(bench, machines, folder, before=((), hidden)))
    assert (first, second) == (2, 2), said + other
    assert "is not shared by all nodes" in said
