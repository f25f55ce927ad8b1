"""gpt-oss trains over its MXFP4 experts as PEFT trains over the same values, and the experts stay in 4 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support import tiny_of, train_step
from test_peft_experts import IDS, OPTIONS, run_ours, with_adapter
from test_peft_parity import check_fp32, order_of_rows, reference_run
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.device import PRECISIONS
from crosstune.torch_engine.experts import QuantStack
from crosstune.torch_engine.loading.load import load_model
from crosstune.torch_engine.quant import mxfp4

SPEC = QuantSpec(quantizer="mxfp4", bits=4, group_size=32)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with MXFP4 experts as gpt-oss ships them, and with their values in fp32."""
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    dense = tiny_of("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "dense", vocab)
    for path in (*tiny_model.glob("*token*"), *tiny_model.glob("*.jinja")):
        shutil.copy(path, dense / path.name)
    packed = dense.parent / "packed"
    shutil.copytree(dense, packed)
    tensors, stored = load_file(dense / "model.safetensors"), {}
    for name, weight in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or weight.ndim != 3:
            stored[name] = weight
            continue
        experts = [mxfp4.quantize(matrix.T, SPEC, torch.float32)[0] for matrix in weight]
        stored[f"{name}_blocks"] = torch.stack([expert["packed"] for expert in experts])
        stored[f"{name}_scales"] = torch.stack([expert["scales"] for expert in experts])
        values = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
        )
        tensors[name] = values.contiguous()
        assert tensors[name].shape == weight.shape
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, dense


def test_values_are_rounded_to_the_nearest_and_read_as_transformers_reads_them() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96) * torch.logspace(-8, 3, 64)[:, None]
    weight[3] = 0
    tensors, facts = mxfp4.quantize(weight, SPEC, torch.bfloat16)
    dense = mxfp4.dequantize(tensors, facts, torch.bfloat16)
    packed, scales = tensors["packed"][None], tensors["scales"][None]
    theirs = convert_moe_packed_tensors(packed, scales, dtype=torch.bfloat16)[0].T
    torch.testing.assert_close(dense, theirs, rtol=0, atol=0)
    scales = torch.exp2(tensors["scales"].float() - 127)[..., None]
    scaled = weight.reshape(64, 3, 32) / scales
    nearest = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().amin(-1)
    torch.testing.assert_close((dense.float().reshape(64, 3, 32) / scales - scaled).abs(), nearest)
    with pytest.raises(UserError, match="33 inputs"):
        mxfp4.check(SPEC, (4, 33))


@pytest.mark.cuda
def test_stacks_have_the_same_bits_on_a_gpu() -> None:
    torch.manual_seed(0)
    packed = torch.randint(256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(1, 250, (3, 40, 5), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        tensors = {"packed": packed, "scales": scales}
        expected = mxfp4.dequantize_stack(tensors, {"shape": [40, 160]}, dtype)
        on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
        found = mxfp4.dequantize_stack(on_gpu, {"shape": [40, 160]}, dtype)
        assert torch.equal(found.cpu(), expected)


def test_steps_over_packed_experts_equal_peft(
    folders: tuple[Path, Path], data_file: Path, tmp_path: Path
) -> None:
    packed, dense = folders
    run = run_ours(packed, data_file, tmp_path, train_type="qlora")
    options = OPTIONS | {"train_type": "qlora"}

    def reference(*_: Any, **__: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        return with_adapter(model, seed=OPTIONS["seed"])

    expected = reference_run(dense, options, order_of_rows(options), make=reference)
    adapter = run / "adapter" / "adapter_model.safetensors"
    check_fp32(run, expected, adapter)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(plain, run / "adapter")(IDS).logits
    words = ["--out", str(tmp_path / "merged"), "--dtype", "fp32"]
    assert main(["merge", str(run), *words]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted, rtol=1e-4, atol=1e-5)


def test_experts_stay_in_four_bits(folders: tuple[Path, Path]) -> None:
    config = make_config(model_name=str(folders[0]), train_type="qlora", backend="cpu", precision="fp32")
    plan = make_plan(config)
    model, _ = load_model(folders[0], plan=plan, precision=PRECISIONS["fp32"], device=torch.device("cpu"))
    stacks = [module for module in model.modules() if isinstance(module, QuantStack)]
    assert len(stacks) == 4
    for stack in stacks:
        assert all(p.dtype == torch.uint8 for p in stack.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda blocks, scales: (blocks, None), "its scales are missing"),
        (lambda blocks, scales: (blocks, scales[:2].clone()), "its scales"),
        (lambda blocks, scales: (blocks[..., :8].clone(), scales), "expected experts x rows x groups x 16"),
        (lambda blocks, scales: (blocks.float(), scales), "not U8"),
        (lambda blocks, scales: (blocks[:, :32].clone(), scales[:, :32].clone()), "by config.json"),
    ],
)
def test_a_damaged_folder_is_refused(
    folders: tuple[Path, Path], data_file: Path, tmp_path: Path, change: Any, words: str
) -> None:
    shutil.copytree(folders[0], tmp_path / "damaged")
    tensors = load_file(folders[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_blocks")).removesuffix("_blocks")
    blocks, scales = change(tensors[f"{name}_blocks"], tensors.pop(f"{name}_scales"))
    tensors |= {f"{name}_blocks": blocks} | ({} if scales is None else {f"{name}_scales": scales})
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=words):
        run_ours(tmp_path / "damaged", data_file, tmp_path, train_type="qlora")


def test_mlx_trains_the_losses_of_torch_over_the_packed_experts(folders: tuple[Path, Path]) -> None:
    """gpt-oss' gate and up projections alternate by row, in the adapter too."""
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    from test_mlx_parity import open_session, window, worst_loss

    on_torch = open_session("cpu", folders[0], train_type="qlora", lora_rank=4)
    on_mlx = open_session("mlx", folders[0], lora_rank=4)
    assert on_mlx.trained_shapes() == on_torch.trained_shapes()
    for step in range(2):
        train_step(on_torch, window(step), lr=1e-2)
    on_mlx.import_state(on_torch.export_state())
    assert worst_loss(on_mlx, on_torch, num_steps=4) < 1e-5
