"""The guides' BackendManager: every documented name, on this machine and on bundled Apple profiles."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the guides' class hands out torch devices")

from backend_manager import (  # noqa: E402
    CAPABILITIES,
    Backend,
    BackendManager,
    detect_backend,
    get_backend_manager,
    get_device,
)
from crosstune.config.load import make_config  # noqa: E402
from crosstune.machines.probe import load_machine  # noqa: E402
from crosstune.planner.gather import make_plan  # noqa: E402


@pytest.fixture(scope="module")
def cpu() -> BackendManager:
    return BackendManager(backend="cpu", verbose=False)


def on(profile: str, backend: str | None = None) -> BackendManager:
    return BackendManager(backend, verbose=False, machine=load_machine(profile))


def test_backend_names() -> None:
    assert [str(backend) for backend in Backend] == ["cuda", "rocm", "xpu", "mlx", "mps", "cpu"]
    assert Backend.CUDA.value == "cuda" and Backend("mps") is Backend.MPS


def test_checking_what_is_available_prints_it(capsys: pytest.CaptureFixture) -> None:
    manager = BackendManager(verbose=True)
    printed = capsys.readouterr().out
    for word in ("available backends", "quantizers", "distributed", "GiB free", str(manager.backend)):
        assert word in printed
    assert manager.backend in manager._available_backends
    assert Backend.CPU in manager._available_backends


def test_cpu_here(cpu: BackendManager) -> None:
    assert (cpu.backend, cpu.device) == (Backend.CPU, torch.device("cpu"))
    assert cpu.supports_quantization(16) and not cpu.supports_quantization(32)
    assert cpu.get_dtype(prefer_bfloat16=False) is torch.float32
    assert cpu.get_distributed_backend() == "gloo"
    assert get_backend_manager("cpu", verbose=False).backend is Backend.CPU
    assert get_device("cpu") == torch.device("cpu") and isinstance(get_device(), torch.device)


def test_memory_is_in_bytes_and_adds_up(cpu: BackendManager) -> None:
    info = cpu.get_memory_info()
    assert info["total_memory"] > 1e8
    assert info["used_memory"] + info["free_memory"] == info["total_memory"]
    assert info["available_memory"] == info["free_memory"]
    assert 0 <= info["percent_used"] <= 100
    assert {"allocated_memory", "reserved_memory"} <= set(info)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here")
def test_unavailable_backend_says_so_in_the_documented_words() -> None:
    with pytest.raises(ValueError) as caught:
        BackendManager(backend="CUDA", verbose=False)
    text = str(caught.value)
    assert text.startswith("Backend 'cuda' is not available")
    assert "--backend auto" in text and "cpu" in text


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_BACKEND", "cpu")
    assert BackendManager.from_env(verbose=False).backend is Backend.CPU
    for variables in ({"FSDP_BACKEND": "auto"}, {"FSDP_BACKEND": ""}, {}):
        assert BackendManager.from_env(verbose=False, environment=variables).backend is detect_backend()


def test_apple_m1_trains_in_mlx_and_mps_falls_back_to_fp16() -> None:
    assert on("apple-m1-16gb").backend is Backend.MLX
    mps = on("apple-m1-16gb", "mps")
    assert mps.device == torch.device("mps")
    assert mps._available_backends == [Backend.MLX, Backend.MPS, Backend.CPU]
    assert not mps.capabilities.supports_bfloat16
    assert mps.get_dtype() is torch.float16
    assert mps.supports_quantization(8) and mps.supports_quantization(16)
    assert not mps.capabilities.supports_flash_attention


def test_batch_size_follows_memory_model_and_length() -> None:
    small, large = on("rtx-4090"), on("h200")
    assert large.get_optimal_batch_size(7) > small.get_optimal_batch_size(7) >= 1
    assert large.get_optimal_batch_size(7) > large.get_optimal_batch_size(70) >= 1
    assert large.get_optimal_batch_size(7) > large.get_optimal_batch_size(7, sequence_length=8192)
    assert on("cpu-laptop").get_optimal_batch_size(model_size_b=400) == 0


def test_model_size_is_checked_against_memory() -> None:
    laptop = on("cpu-laptop")
    laptop.validate_model_size(7)
    with pytest.raises(ValueError, match="exceeds the limit of backend 'cpu'"):
        laptop.validate_model_size(70)
    on("h200").validate_model_size(70)
    assert on("h200").capabilities.max_model_size > laptop.capabilities.max_model_size


def available_backends() -> list[tuple[str, str]]:
    names = ("apple-m2-max-64gb", "cpu-laptop", "rtx-4090", "h200")
    return [(name, backend) for name in names for backend in load_machine(name).available()]


@pytest.mark.parametrize(("profile", "backend"), available_backends())
def test_the_manager_and_train_agree(profile: str, backend: str) -> None:
    manager, capabilities = on(profile, backend), on(profile, backend).capabilities
    # Two processes need two devices, where their library does not let them share one.
    world = 1 if manager.report.device == "cuda" and len(manager.report.devices) == 1 else 2
    plan = make_plan(
        make_config(
            backend=backend,
            model_name="meta-llama/Llama-2-7b-hf",
            train_type="qlora",
            world_size=world,
            use_flash_attention=True,
        ),
        machine=load_machine(profile),
    )
    assert capabilities.supports_flash_attention == plan.config.use_flash_attention
    if manager.report.device == "cpu":
        assert str(manager.get_dtype()).removeprefix("torch.") == {
            "fp32": "float32",
            "bf16_autocast": "bfloat16",
        }.get(plan.precision)
    if plan.world_size == 2:
        assert capabilities.supports_distributed == (plan.collective is not None)
        assert capabilities.supports_fsdp == (capabilities.supports_distributed and plan.engine == "torch")
    asked = make_config(backend=backend, model_name="meta-llama/Llama-2-7b-hf", distributed_backend="nccl")
    used = make_plan(asked, machine=load_machine(profile)).config.distributed_backend
    assert manager.get_distributed_backend() == used


@pytest.mark.parametrize(("profile", "backend"), available_backends())
def test_the_plan_keeps_the_optimal_batch(profile: str, backend: str) -> None:
    manager = on(profile, backend)
    batch = manager.get_optimal_batch_size(7)
    precision = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[
        str(manager.get_dtype()).removeprefix("torch.")
    ]
    plan = make_plan(
        make_config(
            backend=backend,
            model_name="meta-llama/Llama-2-7b-hf",
            train_type="qlora",
            batch_size=batch,
            context_length=2048,
            precision=precision,
            use_gradient_checkpointing=True,
        ),
        machine=load_machine(profile),
    )
    assert plan.config.batch_size == batch
    assert plan.estimated_bytes is not None and plan.estimated_bytes <= plan.usable_bytes


def test_the_watermark_reaches_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    usual = on("apple-m2-max-64gb", "mps")
    batch = usual.get_optimal_batch_size(7)
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.3")
    small = on("apple-m2-max-64gb", "mps")
    assert small.get_optimal_batch_size(7) < batch
    assert small.capabilities.max_model_size < usual.capabilities.max_model_size


def test_names_of_the_guides_for_adding_a_backend(cpu: BackendManager) -> None:
    assert cpu.backend_type == "cpu" and on("apple-m2-max-64gb").backend_type == "mlx"
    assert cpu._detect_available_backends() == cpu._available_backends
    assert BackendManager.CAPABILITIES is CAPABILITIES and list(CAPABILITIES) == list(Backend)
    assert CAPABILITIES[Backend.CPU].quantization_bits == cpu.capabilities.quantization_bits
    if not torch.cuda.is_available():
        assert CAPABILITIES[Backend.CUDA].quantization_bits == []
        assert CAPABILITIES[Backend.CUDA].notes
