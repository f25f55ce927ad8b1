"""The calls of the MPS FSDP guide, on the device of this machine, in one and two processes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra")

import fsdp_ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402
import warm  # noqa: E402
from fsdp_models import DEVICE, Classifier, leave_the_group, rows, sharded, train  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    BackwardPrefetch,
    FullStateDictConfig,
    ShardingStrategy,
)

from crosstune.compat.torch_parts import fsdp_model  # noqa: E402
from crosstune.distributed.master import free_ports  # noqa: E402
from mps_fsdp_wrapper import (  # noqa: E402
    MPSFSDPConfig,
    MPSFSDPWrapper,
    check_mps_fsdp_compatibility,
    wrap_model_for_mps,
)

SCRIPT = Path(fsdp_ranks.__file__)


# Limitations: dtype, backend


def test_bfloat16_stays_where_it_works() -> None:
    wrapper = MPSFSDPWrapper()
    model = wrapper.wrap_model(Classifier(), param_dtype=torch.bfloat16)
    assert model(rows()[0]).dtype == wrapper.config.compute_dtype == torch.bfloat16


def test_bfloat16_becomes_float16_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_model, "working_dtypes", lambda device, notes: ("fp32", "fp16"))
    wrapper = MPSFSDPWrapper()
    with pytest.warns(UserWarning, match="torch.float16 instead of torch.bfloat16"):
        model = wrapper.wrap_model(Classifier(), param_dtype=torch.bfloat16)
    assert model(rows()[0]).dtype == torch.float16
    assert len(wrapper.adjustments) == 1
    monkeypatch.setattr(fsdp_model, "working_dtypes", lambda device, notes: ("fp32",))
    assert fsdp_model.usable_dtype(torch.float16, torch.device(DEVICE)) == torch.float32


def test_the_compatibility_check_names_what_works() -> None:
    info = check_mps_fsdp_compatibility()
    assert info["mps_available"] == torch.backends.mps.is_available()
    assert info["pytorch_version"] == torch.__version__
    assert info.get("float16_supported", False) in (True, False)
    assert info["device"] == DEVICE
    assert info["fsdp_supported"], info["warnings"]
    assert bool(info.get("warnings", [])) >= (not info["mps_available"])
    assert not dist.is_initialized()  # the program may still join a group of its own


# Basic usage


def test_a_model_is_wrapped_by_size() -> None:
    fsdp_model_ = wrap_model_for_mps(Classifier(256), min_num_params=1e5)
    assert {"encoder.layers.0.linear1", "encoder.layers.0.linear2"} <= sharded(fsdp_model_)
    assert fsdp_model_.to(DEVICE) is fsdp_model_
    assert sharded(wrap_model_for_mps(Classifier(), min_num_params=1e6)) == {""}
    assert sharded(wrap_model_for_mps(Classifier(), transformer_layer_cls=nn.TransformerEncoderLayer)) == {
        "",
        "encoder.layers.0",
        "encoder.layers.1",
    }


def test_a_wrapped_model_trains_as_the_plain_one_does() -> None:
    plain = Classifier().to(DEVICE)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 5)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        config = MPSFSDPConfig(sharding_strategy=strategy, use_mixed_precision=False)
        model = MPSFSDPWrapper(config).wrap_transformer(Classifier(), nn.TransformerEncoderLayer)
        assert train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 5) == expected


def test_a_custom_configuration() -> None:
    config = MPSFSDPConfig(sharding_strategy="FULL_SHARD", backward_prefetch="BACKWARD_PRE", backend="gloo")
    assert config.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    model = MPSFSDPWrapper(config).wrap_model(Classifier())
    assert model(rows()[0]).dtype == torch.float16  # computed with
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # kept


def test_every_setting_of_the_guide() -> None:
    config = MPSFSDPConfig(
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        min_num_params=1e6,
        use_mixed_precision=True,
        compute_dtype=torch.float16,
        reduce_dtype=torch.float32,
        buffer_dtype=torch.float16,
        cpu_offload=False,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        backend="gloo",
        world_size=1,
        rank=0,
        sync_module_states=True,
        use_orig_params=True,
        unified_memory_pool_size=None,
        aggressive_memory_optimization=False,
        debug_mode=False,
        profile_memory=False,
    )
    assert config == MPSFSDPConfig()
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, "full_shard"):
        config.sharding_strategy = strategy
    assert config.sharding_strategy is ShardingStrategy.FULL_SHARD


# Memory


def test_a_strategy_is_chosen_for_the_memory() -> None:
    wrapper, model = MPSFSDPWrapper(), Classifier()
    model_size = sum(p.numel() * p.element_size() for p in model.parameters())
    choose = wrapper.memory_optimizer.optimize_sharding_strategy
    wrapper.config.sharding_strategy = choose(model_size, 32 * 1024**3)
    assert wrapper.config.sharding_strategy is ShardingStrategy.NO_SHARD
    for size_gb, expected in ((9, "NO_SHARD"), (20, "SHARD_GRAD_OP"), (40, "FULL_SHARD")):
        assert choose(size_gb * 1e9, 64e9) is ShardingStrategy[expected]


def test_the_memory_pool() -> None:
    config = MPSFSDPConfig(unified_memory_pool_size=16 * 1024**3, aggressive_memory_optimization=True)
    wrapper = MPSFSDPWrapper(config)
    limit = wrapper.memory_optimizer.setup_memory_pool()
    assert limit == (None if DEVICE == "cpu" else 16 * 1024**3)
    model = wrapper.wrap_model(Classifier())
    assert train(model, torch.optim.AdamW(model.parameters()), 1)


def test_memory_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    wrapper = MPSFSDPWrapper()
    model = wrapper.wrap_model(Classifier())
    wrapper.config.profile_memory = True
    batch, target = rows()
    with wrapper.profile_memory():
        nn.functional.cross_entropy(model(batch), target).backward()
    assert capsys.readouterr().out.startswith("memory: ")
    with wrapper.profile_memory() as profile:
        held = torch.ones(64 * 2**20, device=DEVICE)
    assert profile.after_bytes - profile.before_bytes > 200 * 2**20
    stats = wrapper.get_memory_stats()
    assert 0 < held.numel() * 4 / 2**30 <= stats["allocated_gb"] <= stats["reserved_gb"] <= stats["total_gb"]


# Checkpoints


def test_a_checkpoint_continues_the_training(tmp_path: Path) -> None:
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert save_policy.rank0_only
    wrapper, path = MPSFSDPWrapper(), tmp_path / "checkpoint_epoch_10.pt"
    fsdp_model_ = wrapper.wrap_transformer(Classifier())
    optimizer = torch.optim.AdamW(fsdp_model_.parameters(), lr=1e-2)
    train(fsdp_model_, optimizer, 3)
    wrapper.save_checkpoint(
        fsdp_model_,
        checkpoint_path=str(path),
        optimizer=optimizer,
        epoch=10,
        global_step=10000,
        best_loss=0.123,
    )
    expected = train(fsdp_model_, optimizer, 3)
    other = wrapper.wrap_transformer(Classifier())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    checkpoint = wrapper.load_checkpoint(other, checkpoint_path=str(path), optimizer=other_optimizer)
    assert checkpoint.get("epoch", 0) == 10
    assert checkpoint.get("global_step", 0) == 10000
    assert checkpoint.get("best_loss", float("inf")) == 0.123
    assert train(other, other_optimizer, 3) == expected
    plain = Classifier()
    wrapper.load_checkpoint(plain, path)  # also into a model that is not wrapped
    assert torch.isfinite(plain(rows()[0].cpu())).all()


# Several processes


def expect_done(programs: list[warm.Program]) -> None:
    for program in programs:
        code, said = program.end()
        assert code == 0, said[-4000:]


def in_this_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    fsdp_ranks.main(*arguments)


def losses_in(folder: Path) -> list[float]:
    return json.loads((folder / "result.json").read_text())["losses"]


@pytest.mark.slow
def test_two_processes_and_one_continue_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    whole.mkdir()
    moved.mkdir()
    in_this_process(monkeypatch, "FULL_SHARD", str(whole), "0", "9")
    expected = losses_in(whole)
    assert expected[-1] < expected[0]
    code = f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nimport fsdp_ranks\nfsdp_ranks.main(*sys.argv[1:])"

    def in_two_processes(*words: str) -> None:
        [port] = free_ports(1)
        expect_done(warm.start_ranks(code, *words, size=2, port=port, variables={"STAGED": "1"}))

    in_two_processes("FULL_SHARD", str(moved), "0", "3")
    assert losses_in(moved) == pytest.approx(expected[:3], rel=1e-5)
    assert 0.4 < json.loads((moved / "result.json").read_text())["share"] < 0.6
    in_this_process(monkeypatch, "SHARD_GRAD_OP", str(moved), "3", "6")
    assert losses_in(moved) == pytest.approx(expected[3:6], rel=1e-5)
    in_two_processes("NO_SHARD", str(moved), "6", "9")
    assert losses_in(moved) == pytest.approx(expected[6:], rel=1e-5)


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    torchrun = "import sys\nfrom torch.distributed.run import main\nmain(sys.argv[1:])"
    words = ["--standalone", "--nproc_per_node=2", str(SCRIPT), "FULL_SHARD", str(tmp_path), "0", "6"]
    path = os.pathsep.join(filter(None, sys.path))
    expect_done([warm.start(torchrun, *words, variables={"PYTHONPATH": path})])
    losses = losses_in(tmp_path)
    assert losses[-1] < losses[0]


# Quantization


def test_a_quantized_model_is_wrapped_bit_for_bit() -> None:
    pytest.importorskip("hqq", reason="an extra: pip install 'crosstune[hqq]'")
    from quantization_wrapper import HQQAdapter, QuantizationConfig, QuantizationMethod

    def quantized(config: Any) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128))
        model = HQQAdapter(config).quantize_model(layers)
        model[:3].requires_grad_(False)
        return model.to(DEVICE)

    quant_config = QuantizationConfig(method=QuantizationMethod.HQQ_4BIT, bits=4, compute_dtype=torch.float16)
    x = torch.linspace(-1, 1, 512, device=DEVICE).reshape(2, 256)
    expected = quantized(quant_config)(x)
    for min_num_params, layers in ((1e6, {""}), (1e4, {"", "0", "2"})):
        wrapper = MPSFSDPWrapper(MPSFSDPConfig(min_num_params=min_num_params))
        model = wrapper.wrap_model(quantized(quant_config), param_dtype=quant_config.compute_dtype)
        assert sharded(model) == layers
        output = model(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == ["3.weight", "3.bias"]


# Troubleshooting and tips


def test_debug_mode_logs_what_is_gathered(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = MPSFSDPWrapper(MPSFSDPConfig(debug_mode=True))
    model = wrapper.wrap_transformer(Classifier())
    with caplog.at_level("DEBUG", logger="crosstune.mps_fsdp"):
        model(rows()[0]).sum().backward()
    assert "forward gathers encoder.layers.1" in caplog.text
    assert "backward gathers encoder.layers.0" in caplog.text


# The complete example


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "mps-fsdp.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "docs/reference/mps-fsdp.md", "exec"), names)
    assert names["checkpoint"]["epoch"] == 1
