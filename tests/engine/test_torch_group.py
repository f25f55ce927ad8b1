"""The group of several torch processes over gloo: messages, errors that list missing ranks, mismatched collectives."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import warm

from crosstune.distributed.master import free_ports

RANK = """
import os, sys, time
import torch, torch.distributed as dist
from crosstune.core.errors import UserError
from crosstune.process.ranks import Limits
from crosstune.distributed.environment import read_ranks
from crosstune.torch_engine.group import connect
from crosstune.torch_engine.group import peer_errors
limits = Limits(connect_s=float(os.environ.get("LIMIT", "600")), collective_s=600.0, debug="DEBUG" in os.environ)
rank = int(os.environ["RANK"])
try:
    exec(sys.argv[1])
except UserError as error:
    print("\\n".join(error.lines()))
    sys.exit(error.exit_code)
"""
TALK = """
group = connect(read_ranks(), limits)
assert group.any(rank == 1) and not group.any(False)
assert group.all_equal("x") and not group.all_equal(str(rank))
assert group.broadcast("näher" * (1 + rank)) == "näher" and group.broadcast("") == ""
import math
assert group.sum_numbers(0.1, rank) == [math.fsum([0.1] * 3), 3.0]
assert math.isnan(group.sum_numbers((-math.inf, 0.0, math.inf)[rank])[0])
group.open_devices(torch.device("cpu"))
ones = torch.ones(2)
dist.all_reduce(ones)
assert ones.tolist() == [3.0, 3.0]
board = group.open_board()
group.barrier()
group.close()
assert not dist.is_initialized()
"""


def start(rank: int, code: str, *, size: int, port: int, **variables: str) -> warm.Program:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return warm.start(RANK, code, variables={"GLOO_SOCKET_IFNAME": None, **place, **variables})


def run(code: str, *, size: int = 2, **variables: Any) -> list[tuple[int, str]]:
    [port] = free_ports(1)
    ranks = [start(rank, code, size=size, port=port, **variables) for rank in range(size)]
    return [rank.end() for rank in ranks]


def test_processes_talk_to_each_other() -> None:
    for exit_code, said in run(TALK, size=3):
        assert exit_code == 0, said


def test_the_rank_that_serves_the_store_leaves_last() -> None:
    """Another rank may still read from the store, as gloo does when it connects two ranks for the first time."""
    code = """
group = connect(read_ranks(), limits)
group.barrier()
if rank == 1:
    time.sleep(1.0)
    group.store.set("late", "x")
    assert group.store.get("late") == b"x"
group.close()
os._exit(0)
"""
    for exit_code, said in run(code, size=3):
        assert exit_code == 0, said


def test_a_group_that_a_program_made_before_is_left_open() -> None:
    code = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from crosstune.process.ranks import Ranks
place = dict(master_addr="127.0.0.1", master_port=int(os.environ["MASTER_PORT"]), serves_store=True)
connect(Ranks(engine="torch", **place), limits).close()
assert dist.is_initialized()
dist.destroy_process_group()
"""
    [(ended, said)] = run(code, size=1)
    assert ended == 0, said


def test_a_restart_over_the_same_store_does_not_meet_the_attempt_before(tmp_path: Path) -> None:
    """As under torchrun, whose agent serves the store of all attempts."""
    serve = "store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=True, wait_for_workers=False)\n"
    serve += "print('serving', flush=True); time.sleep(900)"
    [port] = free_ports(1)
    agent = start(0, serve, size=1, port=port)
    try:
        while "serving" not in agent.said():
            assert agent.poll() is None, agent.said()
            time.sleep(0.01)
        for attempt in range(2):
            code = "group = connect(read_ranks(), limits); group.barrier()\n"
            code += "found = group.recall(); group.remember(f'run-{group.ranks.attempt}'); print('found', found); group.barrier()\n"
            code += "os._exit(9) if rank else None"  # as if it was killed
            variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            ranks = [start(rank, code, size=2, port=port, **variables) for rank in (0, 1)]
            ends = [rank.end() for rank in ranks]
            assert [exit_code for exit_code, _ in ends] == [0, 9], ends
            before = f"found run-{attempt - 1}" if attempt else "found "
            assert all(before in said for _, said in ends)
    finally:
        agent.kill()


def test_a_rank_that_does_not_come_is_named() -> None:
    [port] = free_ports(1)
    code, said = start(0, "connect(read_ranks(), limits)", size=3, port=port, LIMIT="1").end()
    assert code == 2 and "Ranks 1, 2 of 3 did not connect within 1 s" in said


def test_a_master_that_cannot_be_reached_is_named() -> None:
    [port] = free_ports(1)
    code, said = start(1, "connect(read_ranks(), limits)", size=2, port=port, LIMIT="1").end()
    assert code == 2 and f"cannot reach rank 0 at 127.0.0.1:{port}" in said


def test_a_port_that_another_program_has_is_said_by_every_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ranks = [
            start(rank, "connect(read_ranks(), limits)", size=2, port=port, LIMIT="3") for rank in (0, 1)
        ]
        (first, said_first), (second, said_second) = (rank.end() for rank in ranks)
    assert first == 5 and "another program is using this port" in said_first
    assert second == 2 and "a different program answers" in said_second


def test_two_processes_with_the_same_rank_and_other_sizes_are_refused() -> None:
    assert_said([(0, 3), (1, 3), (1, 3)], "Two processes claim to be rank 1 of 3")
    assert_said([(0, 2), (1, 3)], "start all processes of the run with the same WORLD_SIZE")


def assert_said(places: list[tuple[int, int]], words: str) -> None:
    """Connect processes with these ranks and sizes until one of them says so; the others may wait for the time limit."""
    [port] = free_ports(1)
    code = "connect(read_ranks(), limits)"
    waiting = [start(rank, code, size=size, port=port, LIMIT="120") for rank, size in places]
    ended: list[str] = []
    while waiting and not any(words in said for said in ended):
        for program in [program for program in waiting if program.poll() is not None]:
            ended.append(program.said())
            waiting.remove(program)
        time.sleep(0.02)
    for program in waiting:
        program.kill()
        program.end()
    assert any(words in said for said in ended), ended


DIFFERENT = """
group = connect(read_ranks(), limits)
group.open_devices(torch.device("cpu"))
collectives = {
    "operation": lambda: dist.broadcast(torch.ones(2), 0) if rank else dist.all_reduce(torch.ones(2)),
    "shape": lambda: dist.all_reduce(torch.ones(2 + rank)),
    "dtype": lambda: dist.all_reduce(torch.ones(2, dtype=torch.float32 if rank else torch.float64)),
}
for name, collective in collectives.items():
    group.barrier()
    try:
        with peer_errors(group.ranks, doing="a step"):
            collective()
    except UserError as error:
        assert "called different collectives" in error.message
        print("found", name)
"""


def test_collectives_that_differ_are_found_at_once_in_debug_mode() -> None:
    for _, said in run(DIFFERENT, DEBUG="1"):
        assert [f"found {name}" in said for name in ("operation", "shape", "dtype")] == [True] * 3, said


def test_a_killed_peer_is_a_lost_peer() -> None:
    code = "group = connect(read_ranks(), limits)\nos._exit(9) if rank else group.barrier()"
    (first, said), _ = run(code)
    assert first == 4 and "rank 0 of 2" in said and "lost the connection" in said


@pytest.mark.cuda
def test_nccl_follows_the_limits_of_the_run() -> None:
    import torch
    import torch.distributed as dist

    from crosstune.process.ranks import Limits, Ranks
    from crosstune.torch_engine.group import connect

    [port] = free_ports(1)
    ranks = Ranks(engine="torch", size=1, master_addr="127.0.0.1", master_port=port, serves_store=True)
    group = connect(ranks, Limits(collective_s=1200.0, heartbeat_s=1500.0))
    group.open_devices(torch.device("cuda", 0))
    try:
        ones = torch.ones(4, device="cuda")
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0] * 4
        assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
        assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1500"
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    finally:
        group.close()
