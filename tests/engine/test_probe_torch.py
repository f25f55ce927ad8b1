"""The torch probe on this computer reports only features that ran."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")

from crosstune.core.backend import backend_specs  # noqa: E402
from crosstune.estimate.machine import BackendReport  # noqa: E402
from crosstune.torch_engine import capabilities  # noqa: E402
from crosstune.torch_engine.probe import probe  # noqa: E402


@pytest.fixture(scope="module")
def report() -> BackendReport:
    return probe(backend_specs()["cpu"])


def test_cpu_works_and_is_described(report: BackendReport) -> None:
    assert report.available and report.reason == ""
    assert {"fp32", "bf16"} <= set(report.dtypes)
    assert 0 < report.bf16_speedup < 100
    assert report.collectives == ("gloo",)
    assert report.attention[0] == "flash" and report.attention[-1] == "math"
    assert len(report.devices) == 1 and report.devices[0].name
    assert 0 < report.memory_free_bytes <= report.memory_total_bytes
    assert report.quantizers == {}


def test_probe_leaves_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    probe(backend_specs()["cpu"], quantizers=("bnb",))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "package", "bits"),
    [
        ("bnb", "bitsandbytes", (4, 8)),
        ("hqq", "hqq", (1, 2, 3, 4, 8)),
        ("quanto", "optimum.quanto", (2, 4, 8)),
    ],
)
def test_quantizers_run_on_the_cpu(
    name: str, package: str, bits: tuple[int, ...], capfd: pytest.CaptureFixture
) -> None:
    pytest.importorskip(package, reason=f"{name} is an extra: pip install 'crosstune[{name}]'")
    assert probe(backend_specs()["cpu"], quantizers=(name, "mlx")).quantizers == {name: bits}
    assert capfd.readouterr() == ("", "")


def test_a_quantizer_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)
    report = probe(backend_specs()["cpu"], quantizers=("hqq",))
    assert report.quantizers == {}
    assert [note for note in report.notes if note.startswith("hqq does not import: ")] == list(report.notes)
    assert len(report.notes) == 1


def test_a_quantizer_that_computes_nonsense_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from crosstune.torch_engine.quant import bnb

    honest = bnb.quantize
    monkeypatch.setattr(bnb, "quantize", lambda weight, spec, dtype: honest(weight * 0.5, spec, dtype))
    monkeypatch.setattr(bnb, "BITS", (8,))
    notes: list[str] = []
    assert capabilities.working_bits("bnb", "cpu", torch.float32, notes=notes) == ()
    assert notes == ["8-bit bnb does not run: a small matmul is off by 50%"]


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="this torch is a GPU build"
)
@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu"])
def test_a_cpu_build_says_so(name: str) -> None:
    report = probe(backend_specs()[name])
    assert (report.available, report.reason) == (False, "this torch is a CPU build")


def test_missing_torch_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    report = probe(backend_specs()["cpu"])
    assert (report.available, report.reason) == (False, "torch is not installed")


@pytest.mark.cuda
def test_gpu_has_bf16_nccl_and_flash_attention() -> None:
    report = probe(backend_specs()["cuda"])
    assert report.available, report.reason
    assert report.dtypes == ("fp32", "fp16", "bf16")
    assert report.bf16_speedup > 1  # much more on a GPU that nothing else uses
    assert report.collectives == ("nccl", "gloo")
    assert {"flash", "efficient", "math"} <= set(report.attention)
    assert len(report.devices) == torch.cuda.device_count()
    assert not probe(backend_specs()["rocm"]).available


def test_mps_variables_are_set_before_torch_is_loaded() -> None:
    """torch reads them once, when it is loaded: what they are at that moment is what counts."""
    high, low = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"
    code = """
import os, sys
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "torch" not in sys.modules and not said:
            said.append({key: value for key, value in os.environ.items() if "MPS" in key})
said = []
sys.meta_path.insert(0, Look())
from crosstune.cli.main import main
main(["train", "--backend", "mps", "--model_name", "tiny-random"])
print(said[0])
"""
    environment = {key: value for key, value in os.environ.items() if "MPS" not in key} | {high: "0.4"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
    )
    assert ast.literal_eval(run.stdout) == {"PYTORCH_ENABLE_MPS_FALLBACK": "1", high: "0.4", low: "0.4"}
