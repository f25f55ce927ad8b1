"""MPSFSDPWrapper beyond its guide: invalid settings, torch's policies, tied weights, rejected requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra")

from fsdp_models import DEVICE, Classifier, leave_the_group, rows, sharded, train  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch.distributed.fsdp import ShardingStrategy  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy  # noqa: E402

from crosstune.compat.torch_parts import fsdp_model  # noqa: E402
from crosstune.core.errors import UserError  # noqa: E402
from mps_fsdp_wrapper import MPSFSDPConfig, MPSFSDPWrapper, create_mps_fsdp_wrapper  # noqa: E402


def test_an_optimizer_made_after_a_pass_trains_the_shards() -> None:
    model = create_mps_fsdp_wrapper(sharding_strategy="SHARD_GRAD_OP").wrap_model(Classifier())
    with torch.no_grad():
        model(rows()[0])
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 3)
    assert losses[-1] < losses[0]


def test_bad_settings_are_named_at_once_and_when_changed() -> None:
    wrong: dict[str, Any] = {"sharding_strategy": "FULL", "compute_dtype": torch.int8, "world_size": 1.5}
    wrong |= {"backward_prefetch": "SOON", "rank": -1, "unified_memory_pool_size": 0, "min_num_params": 0}
    config = MPSFSDPConfig()
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name):
            MPSFSDPConfig(**{name: value})
        with pytest.raises(UserError, match=name):
            setattr(config, name, value)
    with pytest.raises(UserError, match="sharding_strategy"):
        config.sharding_stratgy = "NO_SHARD"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"NCCL needs NVIDIA GPUs(.|\n)*backend='gloo'"):
        MPSFSDPConfig(backend="nccl")
    with pytest.raises(UserError, match="one GPU"):
        MPSFSDPConfig(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(UserError, match="rank=2 does not exist"):
        MPSFSDPConfig(world_size=2, rank=2)
    with pytest.raises(UserError, match="min_num_params"):
        create_mps_fsdp_wrapper(min_params=3)


def test_settings_without_effect_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    config = MPSFSDPConfig(
        use_orig_params=False,
        limit_all_gathers=False,
        backward_prefetch=None,
        fallback_to_cpu_ops=["aten::sort"],
    )
    wrapper = MPSFSDPWrapper(config)
    with pytest.warns(UserWarning) as caught:
        wrapper.wrap_model(Classifier())
    assert len(wrapper.adjustments) == 4 <= len(caught)
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in wrapper.adjustments[3]


def test_policies_of_torch_choose_the_layers() -> None:
    layers = {"", "encoder.layers.0", "encoder.layers.1"}
    for policy in (ModuleWrapPolicy({nn.TransformerEncoderLayer}), {nn.TransformerEncoderLayer}):
        assert sharded(MPSFSDPWrapper().wrap_model(Classifier(), auto_wrap_policy=policy)) == layers
    policy = partial(size_based_auto_wrap_policy, min_num_params=2000)
    by_policy = MPSFSDPWrapper().wrap_model(Classifier(), policy)
    assert sharded(by_policy) == layers
    with pytest.raises(UserError, match=r"no LSTM(.|\n)*TransformerEncoderLayer"):
        MPSFSDPWrapper().wrap_transformer(Classifier(), transformer_layer_cls=nn.LSTM)
    with pytest.raises(UserError, match="wrapped already"):
        MPSFSDPWrapper().wrap_model(by_policy)


def test_tied_weights_stay_tied() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 20, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.out(self.encoder(self.embed(ids)).mean(1))

    plain, config = Tied().to(DEVICE), MPSFSDPConfig(min_num_params=100, use_mixed_precision=False)
    model = MPSFSDPWrapper(config).wrap_model(Tied())
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert model.out.weight is model.embed.weight


def test_a_wrapped_model_stays_on_its_device() -> None:
    model = MPSFSDPWrapper(MPSFSDPConfig(cpu_offload=True)).wrap_model(Classifier())
    assert model.to(DEVICE) is model
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert train(model, torch.optim.AdamW(model.parameters()), 2)
    with pytest.raises(UserError, match="cannot be moved to meta"):
        model.to("meta")


def test_another_number_of_processes_than_connected_is_refused() -> None:
    MPSFSDPWrapper().wrap_model(Classifier())
    wrapper = create_mps_fsdp_wrapper(world_size=2, rank=1, sharding_strategy="FULL_SHARD")
    with pytest.raises(UserError, match="world_size=2 does not match the 1"):
        wrapper.wrap_model(Classifier())


def test_without_fsdp_on_mps_one_process_trains_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_model, "fsdp_problem", lambda device: "no kernel")
    monkeypatch.setattr(MPSFSDPWrapper, "_may_run_whole", lambda self: True)
    wrapper = MPSFSDPWrapper(MPSFSDPConfig(compute_dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="no kernel"):
        model = wrapper.wrap_transformer(Classifier(), transformer_layer_cls=nn.TransformerEncoderLayer)
    assert not sharded(model)
    assert model(rows()[0]).dtype == torch.bfloat16
    assert train(model, torch.optim.AdamW(model.parameters()), 2)
    assert MPSFSDPWrapper().device.type == DEVICE
