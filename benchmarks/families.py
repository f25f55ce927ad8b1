"""Compare the losses of every model family and method with an independent loop of transformers and PEFT.

    python benchmarks/families.py
    python benchmarks/families.py --methods lora,packed --families llama,gemma3

Each case trains a tiny random model in fp32 for a few steps, once with crosstune and once with the loop in
tests/parity/test_peft_parity.py, one row at a time without padding. Prints the largest relative difference of a loss, and
exits with 1 if one is above the bound or a case fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))

import test_peft_experts as experts
import test_peft_parity as reference
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.files.json_files import read_jsonl
from crosstune.models.tiny import TINY, tiny_model
from crosstune.recipes.sft import SftRecipe
from crosstune.runs.pipeline import train

BOUND = 2e-5
SHAPE = {
    "vocab_size": TINY.vocab,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": TINY.bos,
    "eos_token_id": TINY.eos,
    "pad_token_id": TINY.pad,
}
_NO_GQA = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
_IDS = {name: SHAPE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama-tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=9),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**SHAPE, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=9),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=9),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
    "phi": lambda: transformers.PhiConfig(**SHAPE),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE),
    "granite": lambda: transformers.GraniteConfig(**SHAPE),
    "stablelm": lambda: transformers.StableLmConfig(**SHAPE),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE, sliding_window=9),
    "cohere": lambda: transformers.CohereConfig(**SHAPE),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_NO_GQA),
    "gpt2": lambda: transformers.GPT2Config(**_IDS, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "opt": lambda: transformers.OPTConfig(
        **_IDS, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, dropout=0.0
    ),
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora"},
    "dora": {"train_type": "dora"},
    "qlora": {"train_type": "qlora"},
    "full": {"train_type": "full"},
    "packed": {"train_type": "lora", "packing": True, "context_length": 128},
    "packed-full": {"train_type": "full", "packing": True, "context_length": 128},
}
OPTIONS = {
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "lr": 3e-3,
    "wd": 0.05,
    "grad_norm": 0.5,
    "seed": 3,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=8)
    own = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="families-") as home:
        data, tokens = write_data(Path(home)), tiny_model(Path(home) / "tiny")
        for family in own.families.split(","):
            model = make_model(family, Path(home) / family, tokens)
            for method in own.methods.split(","):
                words, good = compare(
                    model, method, data, Path(home) / "runs", tokens=tokens, num_steps=own.steps
                )
                failed += not good
                print(f"{family:<12} {method:<12} {words}", flush=True)
    print(
        f"{failed} failed; bound {BOUND}; transformers {transformers.__version__}, torch {torch.__version__}"
    )
    return 1 if failed else 0


def write_data(home: Path) -> Path:
    path = home / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(reference.QUESTIONS, reference.ANSWERS, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_model(family: str, folder: Path, tokens: Path) -> Path:
    torch.manual_seed(1)
    config = FAMILIES[family]()
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for path in (*tokens.glob("*token*"), *tokens.glob("*.jinja")):
        shutil.copy(path, folder / path.name)
    return folder


def compare(
    model: Path, method: str, data: Path, runs: Path, *, tokens: Path, num_steps: int
) -> tuple[str, bool]:
    """Train both sides; return the line to print, and whether they agree. A clear rejection counts as agreement."""
    options = OPTIONS | {"precision": "fp32"} | METHODS[method]
    config = make_config(
        **options,
        model_name=str(model),
        dataset=str(data),
        backend="cpu",
        lr_scheduler="constant",
        lora_rank=8,
        lora_alpha=16,
        max_steps=num_steps,
        num_epochs=100,
        skip_eval=True,
        output_dir=str(runs),
        name=f"{model.name}-{method}",
    )
    try:
        run = train(config)
    except UserError as error:
        return f"refused: {error.message}", True
    ours = [row["loss"] for row in read_jsonl(run.folder / "metrics.jsonl")]
    recipe = SftRecipe(config, model_folder=model, observer=Observers())
    order = [recipe.rows(step) for step in range(num_steps)]
    # Some families' tokenizer classes ignore the splitting rules of tokenizer.json.
    expected, *_ = reference.reference_run(
        model, options, order, make=reference_model, tokenizer_folder=tokens
    )
    worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, expected, strict=True))
    moved = abs(ours[-1] - ours[0])
    return f"{worst:.1e}  (loss {ours[0]:.4f} to {ours[-1]:.4f})", worst <= BOUND and moved > 0.01


def reference_model(folder: Path, train_type: str, seed: int, *, dtype: torch.dtype) -> Any:
    """Load the model with transformers, and adapt all of its linear layers with PEFT."""
    quantized = None
    if train_type == "qlora":
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantized, device_map="cpu" if quantized else None
    )
    if train_type == "full":
        return model
    if quantized is not None:
        return reference_adapters(model, seed)
    return experts.with_adapter(model, seed=seed, use_dora=train_type == "dora")


def reference_adapters(model: Any, seed: int) -> Any:
    model = reference.get_peft_model(
        model,
        reference.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    reference.start_adapter(model, seed=seed)
    return model


if __name__ == "__main__":
    sys.exit(main())
