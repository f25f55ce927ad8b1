"""Loading in the torch engine: errors when transformers fails to build a model, and the dtypes that it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.models.folder import readable_errors
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.device import PRECISIONS
from crosstune.torch_engine.loading.load import empty_model, load_model, read_config


@pytest.mark.parametrize("fault", [AttributeError, ZeroDivisionError, AssertionError])
def test_a_fault_of_the_library_names_the_folder(fault: type[Exception]) -> None:
    with (
        pytest.raises(UserError, match="cannot load the model in model") as found,
        readable_errors(Path("model")),
    ):
        raise fault("what it says")
    assert fault.__name__ in found.value.why


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("std::bad_alloc")]
)
def test_running_out_of_memory_is_not_a_fault_of_the_model(error: Exception) -> None:
    with pytest.raises(type(error)) as found, readable_errors(Path("model")):
        raise error
    assert found.value is error


@pytest.mark.parametrize("is_half", [False, True])
def test_a_sharded_load_keeps_in_fp32_what_transformers_keeps(
    is_half: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models name weights that are not rounded; a model that is sharded as it is loaded has the same."""
    from transformers import LlamaForCausalLM

    precision = "fp16" if is_half else "bf16"
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["layers.*.mlp.up_proj"])
    plan = make_plan(make_config(backend="cpu", precision=precision, train_type="full", skip_eval=True))
    shared = {"plan": plan, "precision": PRECISIONS[precision], "device": torch.device("cpu")}
    whole, _ = load_model(tiny_model, **shared)
    parts, _ = load_model(tiny_model, **shared, finish=lambda model, block: None)
    wanted, found = whole.state_dict(), parts.state_dict()
    assert wanted["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    up = wanted["model.layers.1.mlp.up_proj.weight"].dtype
    assert up == (torch.float32 if is_half else torch.bfloat16)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_an_empty_model_is_the_one_that_accelerate_builds(tiny_model: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        theirs = AutoModelForCausalLM.from_config(read_config(tiny_model), dtype=torch.bfloat16)
    ours = empty_model(tiny_model, dtype=torch.bfloat16)
    facts = [
        {
            name: (each.device.type, each.dtype, each.shape, each.requires_grad, vars(each))
            for name, each in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        }
        for model in (ours, theirs)
    ]
    assert facts[0] == facts[1]
    assert {each.device.type for each in ours.parameters()} == {"meta"}
    assert {each.device.type for each in ours.buffers()} == {"cpu"}
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
