"""Compare the fast layers with transformers + PEFT on the device, for each family and base precision.

Gradients of every adapter are compared with PEFT's in fp32 over the same (rounded) weights. PEFT's own gradients in the
precision of the run are compared too, to show the effect of rounding alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from crosstune.core.quantization import QuantSpec
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import E4M3
from crosstune.torch_engine.loading.adapters import add_adapters
from crosstune.torch_engine.quant.fp8 import row_scales
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight

SPECS = {
    "bf16": None,
    "nf4": QuantSpec(quantizer="bnb", bits=4, group_size=64),
    "fp8": QuantSpec(quantizer="fp8", bits=8, group_size=0),
    "nf4 in fp8": QuantSpec(quantizer="bnb", bits=4, group_size=64),
}
BOUNDS = {"bf16": 0.999, "nf4": 0.999, "fp8": 0.98, "nf4 in fp8": 0.98}
RANK = 16


def families(width: int) -> dict[str, Any]:
    """Return a config of each family, with the features that its layers need."""
    head = width // 8
    shape = {
        "vocab_size": 2048,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4 // 64 * 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    windows = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": hf.LlamaConfig(**shape),
        "mistral": hf.MistralConfig(**shape, sliding_window=64),
        "qwen2": hf.Qwen2Config(**shape),
        "qwen3": hf.Qwen3Config(**shape, head_dim=head),
        "gemma": hf.GemmaConfig(**shape, head_dim=head),
        "gemma3": hf.Gemma3TextConfig(**shape, head_dim=head, sliding_window=64, layer_types=windows),
        "phi3": hf.Phi3Config(**shape, partial_rotary_factor=0.5),
    }


def compare(name: str, config: Any, base: str, *, device: str, packed: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config).to(device, dtype)
    exact = _with_dense_base(model, base, dtype)
    settings = AdapterSettings(
        rank=RANK, alpha=2 * RANK, dropout=0.0, rank_stabilized=False, magnitudes=False
    )
    adapters = add_adapters(model, targets="all", settings=settings, seed=0)
    if SPECS[base] is not None:
        for adapter in adapters.values():
            bias = adapter.base.bias
            stored = quantize_weight(adapter.base.weight.detach(), SPECS[base], dtype)
            adapter.base = QuantLinear(stored, bias.detach() if bias is not None else None)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.02)
    length = 256 if device == "cuda" else 40
    drawn = _draw_tokens(4 * length + 1, 2048).to(device)
    ids, targets = drawn[:-1].view(4, length), drawn[1:]
    positions, bounds = None, None
    if packed:
        first = length // 3
        one = torch.cat([torch.arange(first), torch.arange(length - first)])
        positions = one.repeat(4, 1).to(device)
        starts = [start for row in range(4) for start in (row * length, row * length + first)]
        bounds = torch.tensor([*starts, 4 * length], dtype=torch.int32, device=device)
    decoder = FastDecoder(model, dtype=dtype, fp8="fp8" in base)
    loss = decoder.loss(decoder.hidden(ids, positions=positions, bounds=bounds), targets)
    loss.backward()
    found = {n: (a.lora_A.grad.float(), a.lora_B.grad.float()) for n, a in adapters.items()}
    wide_loss, wide = _reference(copy.deepcopy(exact).float(), adapters, ids, positions, targets)
    peft_loss, peft = _reference(exact, adapters, ids, positions, targets)
    ours, theirs = _worst(found, wide), _worst(peft, wide)
    bound = BOUNDS[base] if device == "cuda" or "fp8" not in base else 0.95  # narrow layers round more
    return {
        "family": name,
        "base": base,
        "packed": packed,
        "loss_off": abs(loss.item() - wide_loss) / wide_loss,
        "peft_loss_off": abs(peft_loss - wide_loss) / wide_loss,
        "worst_cosine": ours,
        "peft_worst_cosine": theirs,
        "ok": ours >= bound and abs(loss.item() - wide_loss) / wide_loss <= 2e-3,
    }


def _draw_tokens(count: int, vocabulary: int) -> torch.Tensor:
    """Return random tokens that are as frequent as the words of a text: the n-th with a probability proportional to 1 / n.
    With equally frequent tokens, the gradients of different tokens would cancel, unlike in text."""
    frequency = 1 / torch.arange(1, vocabulary - 2)
    return 3 + torch.multinomial(frequency, count, replacement=True)


def _with_dense_base(model: Any, base: str, dtype: torch.dtype) -> Any:
    """Return a copy with the linear weights that the base's matmuls effectively use."""
    exact, spec = copy.deepcopy(model), SPECS[base]
    if spec is not None:
        for layer in exact.model.layers.modules():
            if isinstance(layer, nn.Linear):
                dense = quantize_weight(layer.weight.detach(), spec, dtype).dequantize(dtype)
                if base == "nf4 in fp8":
                    scales = row_scales(dense)[:, None]
                    dense = ((dense.float() / scales).to(E4M3).float() * scales).to(dtype)
                layer.weight.data = dense
    return exact


def _reference(
    model: Any,
    adapters: dict[str, Any],
    ids: torch.Tensor,
    positions: torch.Tensor | None,
    targets: torch.Tensor,
) -> tuple[float, dict[str, Any]]:
    """Return the loss and the adapters' gradients of PEFT, starting from the same adapters."""
    names = sorted({name.rpartition(".")[2] for name in adapters})
    model = get_peft_model(
        copy.deepcopy(model),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names, task_type="CAUSAL_LM"),
    )
    layers = dict(model.named_modules())
    pairs = {name: layers[f"base_model.model.{name}"] for name in adapters}
    for name, layer in pairs.items():
        layer.lora_A["default"].weight.data.copy_(adapters[name].lora_A.data)
        layer.lora_B["default"].weight.data.copy_(adapters[name].lora_B.data)
    narrow = next(model.get_base_model().model.embed_tokens.parameters()).dtype == torch.bfloat16
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    loss.backward()
    gradients = {
        name: (
            layer.lora_A["default"].weight.grad.float(),
            layer.lora_B["default"].weight.grad.float(),
        )
        for name, layer in pairs.items()
    }
    return loss.item(), gradients


def _worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return min(
        F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()
        for name in expected
        for a, b in zip(found[name], expected[name], strict=True)
    )


def run(device: str, *, smoke: bool) -> list[dict[str, Any]]:
    rows = []
    chosen = families(64 if smoke else 1024)
    for name, config in list(chosen.items())[-2 if smoke else 0 :]:
        for base in SPECS:
            for packed in (False, True) if base == "bf16" else (False,):
                rows.append(compare(name, config, base, device=device, packed=packed))
    return rows
