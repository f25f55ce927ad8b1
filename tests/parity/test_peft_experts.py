"""Adapters on GPT-2's layers and on the experts of a mixture train, save, load and merge as PEFT's do."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support import tiny_of
from test_peft_parity import NUM_STEPS, check_fp32, order_of_rows, reference_run
from transformers import AutoModelForCausalLM

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.runs.pipeline import train

IDS = torch.arange(3, 43).reshape(2, 20)
OPTIONS = {
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lr": 3e-3,
    "wd": 0.05,
    "grad_norm": 0.5,
    "seed": 3,
}


@pytest.fixture(scope="module")
def make_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model of a family, with the tiny model's tokenizer."""

    @functools.cache
    def make(family: str) -> Path:
        vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        folder = tiny_of(family, tmp_path_factory.mktemp("models") / family, vocab)
        for path in (*tiny_model.glob("*token*"), *tiny_model.glob("*.jinja")):
            shutil.copy(path, folder / path.name)
        return folder

    return make


def targets_of(model: Any) -> dict[str, Any]:
    """Tell PEFT to adapt every linear layer but the head and the last of Mamba, whose kernel reads the weight, and every
    stack of experts."""
    read_by_kernel = {
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("MambaLayer", "Mamba2Mixer", "FalconH1Mixer"))
    }
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
        and name not in {"lm_head", "embed_out"} | read_by_kernel
    ]
    stacks = [name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name]
    return {"target_modules": linear, "target_parameters": stacks or None}


def with_adapter(model: Any, *, seed: int, **options: Any) -> Any:
    from crosstune.core.weights import uniform_by_name

    first = (
        "gate_up_proj" if any("gate_up_proj" in name for name, _ in model.named_parameters()) else "up_proj"
    )
    stacks = {
        "experts.base_layer": f"experts.{first}",
        "experts": "experts.down_proj",
    }  # the outermost is the last
    model = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **targets_of(model), **options)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                layer = name.removeprefix("base_model.model.").split(".lora_A.")[0]
                for wrapper, stack in stacks.items():
                    if layer.endswith(f".{wrapper}"):
                        layer = f"{layer.removesuffix(wrapper)}{stack}"
                        break
                start = uniform_by_name(layer, shape=tuple(parameter.shape), seed=seed)
                parameter.copy_(torch.from_numpy(start))
    return model


def run_ours(model: Path, data: Path, folder: Path, **options: Any) -> Path:
    run = train(
        make_config(
            **({"train_type": "lora", "precision": "fp32", "max_steps": NUM_STEPS} | OPTIONS | options),
            model_name=str(model),
            dataset=str(data),
            backend="cpu",
            lr_scheduler="constant",
            lora_rank=8,
            lora_alpha=16,
            skip_eval=True,
            output_dir=str(folder),
            name="run",
        )
    )
    return run.folder


@pytest.mark.parametrize(
    ("family", "train_type"),
    [("gpt2", "dora"), ("gpt_oss", "lora"), ("mixtral", "qlora"), ("gpt2", "qlora"), ("qwen3_moe", "qlora"), ("qwen3_5", "lora"),
     ("granitemoehybrid", "lora"), ("nemotron_h", "lora"), ("falcon_h1", "lora"), ("lfm2", "dora")],
)  # fmt: skip
def test_steps_equal_peft(
    make_model: Any, data_file: Path, tmp_path: Path, family: str, train_type: str
) -> None:
    folder = make_model(family)
    run = run_ours(folder, data_file, tmp_path, train_type=train_type)

    def reference(*_: Any, **__: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if train_type == "qlora":
            quantize_by_hand(model)
        return with_adapter(model, seed=OPTIONS["seed"], use_dora=train_type == "dora")

    options = OPTIONS | {"train_type": train_type}
    order = order_of_rows(options)
    expected = reference_run(folder, options, order, make=reference)
    check_fp32(run, expected, run / "adapter" / "adapter_model.safetensors")


@torch.no_grad()
def quantize_by_hand(model: Any) -> None:
    """Give every linear layer and every expert the values that bitsandbytes' 4 bits leave of them."""
    import bitsandbytes.functional as bnb

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        packed, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        return bnb.dequantize_4bit(packed, state)

    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":  # transformers quantizes it with a row per output
            module.weight.copy_(rounded(module.weight.T).T)
        elif type(module).__name__ == "Linear" and name != "lm_head":
            module.weight.copy_(rounded(module.weight))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and ".experts." in name:
            for matrix in parameter:
                matrix.copy_(rounded(matrix))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_5", "nemotron_h"])
def test_what_was_trained_loads_and_merges_as_in_peft(
    make_model: Any, data_file: Path, tmp_path: Path, family: str
) -> None:
    folder = make_model(family)
    run = run_ours(folder, data_file, tmp_path, max_steps=4)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), run / "adapter"
    )
    assert main(["merge", str(run), "--out", str(tmp_path / "merged")]) == 0
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(
        load_file(folder / "model.safetensors")
    ), "the same names as in the base, so that whatever reads the base reads this"
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        adapted = loaded(IDS).logits
        torch.testing.assert_close(ours(IDS).logits, adapted, rtol=1e-4, atol=1e-5)
        before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
        assert (adapted - before).abs().max() > 1e-3, "an adapter that changes nothing proves nothing"
        theirs = loaded.merge_and_unload()
    state = theirs.state_dict()
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, state[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_an_adapter_trained_by_peft_is_continued(
    make_model: Any, data_file: Path, tmp_path: Path, family: str
) -> None:
    folder = make_model(family)
    model = with_adapter(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)
        expected = model.eval()(IDS).logits
    model.save_pretrained(tmp_path / "theirs")
    words = [str(tmp_path / "theirs"), "--base", str(folder), "--out", str(tmp_path / "merged")]
    assert main(["merge", *words]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    run_ours(
        folder, data_file, tmp_path, base_adapter=str(tmp_path / "theirs"), lr=1e-30, wd=0.0, max_steps=1
    )
    after = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name, weight in load_file(tmp_path / "theirs" / "adapter_model.safetensors").items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0)


def test_an_adapter_on_experts_has_no_form_for_mlx_lm(
    make_model: Any, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model("mixtral")
    with_adapter(AutoModelForCausalLM.from_pretrained(folder), seed=1).save_pretrained(tmp_path / "adapter")
    words = [str(tmp_path / "adapter"), "--to", "mlx", "--original", str(folder)]
    assert main(["convert", *words]) == 2
    assert "target_parameters" in capsys.readouterr().err
