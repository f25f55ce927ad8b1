"""Mismatched processes and unreachable addresses: each process ends with a reason, none hangs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import warm
from injection import ranks
from injection.bench import Bench

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import EXIT_PORT_TAKEN, UserError
from crosstune.distributed.environment import ranks_in, with_options
from crosstune.distributed.group import check_versions
from crosstune.distributed.master import free_ports
from crosstune.process.ranks import Ranks, SingleProcess


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("input"))


def start(bench: Bench, folder: Path, **of_rank_one: Any) -> list[tuple[int, str]]:
    """Two ranks as another program would start them; the second one has other options."""
    [port] = free_ports(1)
    started = [
        start_rank(rank, bench.words("lora", folder, **ranks.OPTIONS | (of_rank_one if rank else {})), port)
        for rank in (0, 1)
    ]
    return [program.end() for program in started]


def start_rank(rank: int, words: list[str], port: int) -> warm.Program:
    # Without MASTER_ADDR they meet on this machine.
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    return warm.start(warm.MAIN, *words, variables=place)


def test_a_rank_with_other_options_is_refused_by_all(bench: Bench, tmp_path: Path) -> None:
    for code, said in start(bench, tmp_path / "run", lr=1e-5):
        assert code == 2 and "The 2 processes of the run differ: options (lr)." in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_rank_that_does_not_see_the_model_names_itself(bench: Bench, tmp_path: Path) -> None:
    (first, _), (second, said) = start(bench, tmp_path / "run", model_name=str(tmp_path / "absent"))
    assert second == 2 and "rank 1 of 2 (host" in said and "absent" in said
    assert first == 4  # it lost the other one


def test_a_port_in_use_is_said(bench: Bench, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = bench.words("lora", tmp_path / "run", **ranks.OPTIONS)
        code, said = start_rank(0, words, other.getsockname()[1]).end()
    assert (
        code == EXIT_PORT_TAKEN
    )  # of which a launcher that was given the port makes 2, see tests/unit/test_launch.py
    assert "cannot listen on 127.0.0.1" in said and "another program is using this port" in said


def test_other_versions_are_refused() -> None:
    class Apart(SingleProcess):
        ranks = Ranks(engine="torch", rank=1, size=2, host="h")

        def all_equal(self, text: str) -> bool:
            return False

        def broadcast(self, text: str) -> str:
            return "crosstune 0.0, torch 1.0"

    with pytest.raises(UserError, match="different versions") as caught:
        check_versions(Apart())
    assert "rank 1 of 2 (host h) has crosstune" in caught.value.why
    assert "rank 0 has crosstune 0.0, torch 1.0" in caught.value.why


def test_a_number_of_processes_that_contradicts_the_variables_is_refused(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert main(bench.words("lora", tmp_path / "run", world_size=3)) == 2
    assert "--world_size is 3, but NNODES x NPROC_PER_NODE is 1 x 2" in capsys.readouterr().err
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("NPROC_PER_NODE")
    assert main(bench.words("lora", tmp_path / "run", world_size=3)) == 2
    assert "--world_size 3 is not divisible" in capsys.readouterr().err


def test_an_address_that_contradicts_the_variables_is_refused() -> None:
    config = make_config(master_addr="10.0.0.9")
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    with pytest.raises(UserError, match=r"--master_addr is 10.0.0.9, but MASTER_ADDR is 10.0.0.1"):
        with_options(variables, config)
    del variables["MASTER_ADDR"]
    found = ranks_in(with_options(variables, config))
    assert found is not None and found.master_addr == "10.0.0.9"
