"""Collectives staged through host memory give gloo's results bit for bit, on host tensors and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch extra")

HERE = Path(__file__).parent


def run_ranks(script: str, *arguments: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, str(HERE / script), *arguments],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done


def results(tmp_path: Path, *, backend: str, device: str, ranks: int) -> list[dict[str, str]]:
    out = tmp_path / f"{backend}-{device}"
    done = run_ranks("staged_ranks.py", backend, device, str(out), ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_staged_collectives_equal_gloo_on_host_tensors(tmp_path: Path, ranks: int) -> None:
    plain = results(tmp_path, backend="gloo", device="cpu", ranks=ranks)
    staged = results(tmp_path, backend="staged_copies", device="cpu", ranks=ranks)
    assert len(plain[0]) > 20
    assert staged == plain


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2, 3])
def test_staged_collectives_equal_gloo_on_one_gpu(tmp_path: Path, ranks: int) -> None:
    plain = results(tmp_path, backend="gloo", device="cpu", ranks=ranks)
    staged = results(tmp_path, backend="staged", device="cuda:0", ranks=ranks)
    assert staged == plain


def train(tmp_path: Path, *, backend: str, device: str, ranks: int) -> list[float]:
    out = tmp_path / f"train-{backend}-{device}.json"
    done = run_ranks("staged_training.py", backend, device, str(out), ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    losses: list[float] = json.loads(out.read_text())
    assert losses[-1] < losses[0]
    return losses


def test_fsdp_over_the_staged_backend_equals_gloo_on_host_tensors(tmp_path: Path) -> None:
    plain = train(tmp_path, backend="gloo", device="cpu", ranks=2)
    assert train(tmp_path, backend="staged_copies", device="cpu", ranks=2) == plain


@pytest.mark.cuda
def test_fsdp_of_two_processes_on_one_gpu_equals_gloo_on_the_cpu(tmp_path: Path) -> None:
    plain = train(tmp_path, backend="gloo", device="cpu", ranks=2)
    staged = train(tmp_path, backend="staged", device="cuda", ranks=2)
    assert staged == pytest.approx(plain, rel=1e-5)


def test_mismatched_collectives_are_found_in_debug_mode() -> None:
    done = run_ranks("staged_mismatch.py", ranks=2, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode != 0
    assert "mismatch" in done.stderr
