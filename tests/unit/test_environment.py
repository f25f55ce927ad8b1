"""Detection of multi-process runs (mlx.launch, torchrun, SLURM, the guides), and their time limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstune.config.load import load_config, make_config
from crosstune.config.time_limits import limit_warnings, limits_of, nccl_variables
from crosstune.core.errors import UserError
from crosstune.distributed.environment import nodes_in, ranks_in

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    return str(path)


def test_a_process_learns_its_place(tmp_path: Path) -> None:
    hosts = [["10.0.0.1:5000", "10.0.0.9:5000"], ["10.0.0.2:5000"], ["10.0.0.2:5001"]]
    environment = {"MLX_HOSTFILE": hostfile(tmp_path, json.dumps(hosts)), "MLX_RANK": "2"}
    ranks = ranks_in(environment)
    assert ranks is not None
    assert (ranks.engine, ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == ("mlx", 2, 3, 1, 2)
    assert ranks.launcher is None and not ranks.first


def test_a_process_on_its_own_is_no_rank(tmp_path: Path) -> None:
    assert ranks_in({}) is None
    assert ranks_in({"MLX_HOSTFILE": hostfile(tmp_path, "\n"), "MLX_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        ("{", "0", "is not an MLX ring host file"),
        ('[{"ssh": "mac1"}, {"ssh": "mac2"}]', "0", "is not an MLX ring host file"),
        ('[["a:1"], ["b:1"]]', "2", "MLX_RANK cannot be '2'"),
        (None, "0", "is not an MLX ring host file"),
        ("", "0", "do not form a ring"),
    ],
)
def test_what_is_wrong_with_a_ring_is_said(text: str | None, rank: str, words: str, tmp_path: Path) -> None:
    path = str(tmp_path / "missing") if text is None else hostfile(tmp_path, text) if text else ""
    with pytest.raises(UserError, match=words):
        ranks_in({"MLX_HOSTFILE": path, "MLX_RANK": rank})


def test_a_process_of_torchrun_learns_its_place() -> None:
    ranks = ranks_in(TORCHRUN)
    assert ranks is not None
    assert (ranks.engine, ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == ("torch", 3, 4, 1, 2)
    assert (ranks.node_rank, ranks.num_nodes, ranks.attempt) == (1, 2, 2)
    assert (ranks.master_addr, ranks.master_port, ranks.serves_store) == ("10.0.0.1", 29400, False)


def test_rank_zero_serves_the_store_where_no_agent_does() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    ranks = ranks_in(by_hand)
    assert ranks is not None and ranks.serves_store and ranks.master_port == 29500
    assert (ranks.local_size, ranks.num_nodes) == (2, 1)
    first = ranks_in(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    assert first is not None and not first.serves_store


@pytest.mark.parametrize(
    "more", [{}, {"LOCAL_WORLD_SIZE": "2"}, {"SLURM_JOB_NUM_NODES": "1"}, {"NNODES": "1"}]
)
def test_ranks_without_an_address_meet_on_this_machine(more: dict[str, str]) -> None:
    ranks = ranks_in({"RANK": "1", "WORLD_SIZE": "2", **more})
    assert ranks is not None and (ranks.master_addr, ranks.master_port) == ("127.0.0.1", 29500)
    assert (ranks.local_rank, ranks.local_size, ranks.num_nodes) == (1, 2, 1)


@pytest.mark.parametrize(
    "more",
    [{"NNODES": "2"}, {"LOCAL_WORLD_SIZE": "1"}, {"SLURM_NNODES": "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}],
)
def test_ranks_on_several_nodes_need_an_address(more: dict[str, str]) -> None:
    with pytest.raises(UserError, match="MASTER_ADDR is not set") as caught:
        ranks_in({"RANK": "0", "WORLD_SIZE": "2", **more})
    assert f"{next(iter(more))} is" in caught.value.why


def test_a_task_of_srun_learns_its_place() -> None:
    ranks = ranks_in(SRUN)
    assert ranks is not None
    assert (ranks.engine, ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == ("torch", 5, 8, 1, 4)
    assert (ranks.master_addr, ranks.node_rank, ranks.num_nodes) == ("gpu007", 1, 2)
    other = ranks_in(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert other is not None and other.master_port == ranks.master_port and other.serves_store


def test_the_script_of_sbatch_is_no_task() -> None:
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert ranks_in(script | {"SLURM_PROCID": "0"}) is None


def test_the_variables_of_the_guides_are_for_a_launcher() -> None:
    guide = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert ranks_in(guide) is None
    nodes = nodes_in(guide)
    assert nodes is not None
    assert (nodes.num_nodes, nodes.node_rank, nodes.num_local) == (2, 1, 2)
    assert (nodes.master_addr, nodes.master_port) == ("10.0.0.1", 29500)
    assert nodes_in({}) is None and nodes_in(guide | TORCHRUN) is None
    one = nodes_in({"NNODES": "1", "NPROC_PER_NODE": "2"})
    assert one is not None and (one.num_nodes, one.num_local, one.master_addr) == (1, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK cannot be '4'"),
        (TORCHRUN | {"WORLD_SIZE": "4.0"}, "WORLD_SIZE cannot be '4.0'"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "RANK is set, but WORLD_SIZE is not"),
        (TORCHRUN | {"MASTER_ADDR": "10.0.0.1:29500"}, "MASTER_ADDR cannot be '10.0.0.1:29500'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT cannot be '70000'"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but RANK is not set"),
        (SRUN | {"SLURM_JOB_NODELIST": "gpu[001-]"}, "is not a list of SLURM nodes"),
    ],
)
def test_variables_that_cannot_be_meant_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ranks_in(variables)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "a"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK cannot be '2'"),
        ({"NNODES": "1", "NPROC_PER_NODE": "2", "WORLD_SIZE": "3"}, "WORLD_SIZE is 3, but NNODES x"),
    ],
)
def test_machines_that_cannot_be_meant_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        nodes_in(variables)


def test_the_defaults_are_those_of_the_guide() -> None:
    limits = limits_of(make_config())
    assert (limits.collective_s, limits.heartbeat_s, limits.debug) == (1800.0, 1800.0, False)
    variables = nccl_variables(limits)
    assert variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1800"
    assert variables["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert limit_warnings(make_config(), {}) == []


def test_the_variables_of_the_guide_are_read() -> None:
    config = load_config(environment={"NCCL_TIMEOUT": "900", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"})
    limits = limits_of(config)
    assert (limits.collective_s, limits.heartbeat_s) == (900.0, 1200.0)
    assert limit_warnings(config, {"NCCL_TIMEOUT": "900"}) == []


def test_the_heartbeat_is_never_shorter_than_a_collective() -> None:
    config = make_config(collective_timeout="30m", heartbeat_timeout="10m")
    assert limits_of(config).heartbeat_s == 1800.0
    [warning] = limit_warnings(config, {})
    assert "heartbeat_timeout is 600 s, shorter than collective_timeout" in warning
    assert limits_of(make_config(collective_timeout="2h")).heartbeat_s == 7200.0


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({"collective_timeout": "1800000"}, {}, "not milliseconds"),
        ({"collective_timeout": "30"}, {}, "collective_timeout is 30 s"),
        (
            {"collective_timeout": "20m"},
            {"NCCL_TIMEOUT": "7200"},
            "NCCL_TIMEOUT is 7200, but --collective_timeout 20m",
        ),
        ({}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "so 0 is used"),
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "would never abort"),
    ],
)
def test_values_that_cannot_be_meant_are_warned_of(
    options: dict[str, str], variables: dict[str, str], words: str
) -> None:
    warnings = limit_warnings(make_config(**options), variables)
    assert len(warnings) == 1 and words in warnings[0]


@pytest.mark.parametrize("value", ["0", "-5", "soon", "10 parsecs", ""])
def test_what_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(UserError):
        make_config(collective_timeout=value)
