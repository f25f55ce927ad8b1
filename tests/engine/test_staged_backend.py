"""Collectives staged through host memory give gloo's results bit for bit, on host tensors and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch extra")

HERE = Path(__file__).parent


def run_ranks(
    script: str, *arguments: str, ranks: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [*command, str(HERE / script), *arguments],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_and_fsdp_equal_gloo_on_host_tensors(ranks: int) -> None:
    done = run_ranks("staged_ranks.py", "cpu", "stage_host", ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 20


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_and_fsdp_of_processes_on_one_gpu_equal_gloo_on_the_cpu(ranks: int) -> None:
    done = run_ranks("staged_ranks.py", "cuda", ranks=ranks)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]


def test_mismatched_collectives_are_found_in_debug_mode() -> None:
    done = run_ranks("staged_mismatch.py", ranks=2, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode != 0
    assert "mismatch" in done.stderr
