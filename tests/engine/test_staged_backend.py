"""Collectives staged through host memory give gloo's results bit for bit, on host tensors and on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm

from crosstune.distributed.master import free_ports

pytest.importorskip("torch", reason="the torch extra")

HERE = Path(__file__).parent


def test_collectives_and_fsdp_equal_gloo_on_host_tensors() -> None:
    code = (HERE / "staged_ranks.py").read_text(encoding="utf-8")
    place = {"port": free_ports(1)[0], "variables": {"GLOO_SOCKET_IFNAME": "lo"}}
    ended = [rank.end() for rank in warm.start_ranks(code, "cpu", "stage_host", size=3, **place)]
    assert [code for code, _ in ended] == [0] * 3, ended
    assert "collectives are equal" in ended[0][1]
    assert int(ended[0][1].partition(" collectives are equal")[0].split()[-1]) > 15


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_and_fsdp_of_processes_on_one_gpu_equal_gloo_on_the_cpu(ranks: int) -> None:
    # A fork of a process that has looked at the GPU cannot use it, so these start from nothing.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / "staged_ranks.py"), "cuda"], capture_output=True, text=True, timeout=300
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
