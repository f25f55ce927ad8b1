"""Training equals a plain transformers + PEFT loop, written here without any code of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support import assert_close_after_adam
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from crosstune.config.load import make_config
from crosstune.files.json_files import read_jsonl
from crosstune.runs.pipeline import train

NUM_STEPS, LR = 8, 3e-3
BF16_BOUND = 0.004
"""Largest relative difference of a loss in bf16: about twice the value measured (docs/internals/results-history.md)."""
QUESTIONS = [f"Count to {n} please, " + "slowly " * (n % 5) for n in range(1, 33)]
ANSWERS = [" ".join(str(i) for i in range(1, 1 + n % 9)) or "none" for n in range(1, 33)]


class Reference(NamedTuple):
    """Loss and gradient norm of every step, and the trained weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def reference_run(
    folder: Path,
    options: dict[str, Any],
    order: list[list[int]],
    *,
    make: Any = None,
    tokenizer_folder: Path | None = None,
) -> Reference:
    """Train with transformers and PEFT alone: tokenize, mask the prompt, sum, divide, step."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or folder)
    precision = options.get("precision", "fp32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = (make or reference_model)(folder, options["train_type"], options["seed"], dtype=dtype)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": options["wd"]},
        {"params": [p for p in trained.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options["lr"])
    losses, norms = [], []
    for rows in order:
        encoded = [encode(tokenizer, QUESTIONS[row], ANSWERS[row]) for row in rows]
        num_supervised = sum(int((labels[1:] != -100).sum()) for _, labels in encoded)
        total = 0.0
        for ids, labels in encoded:  # one row at a time, without padding
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16_autocast"):
                logits = model(input_ids=ids[None]).logits[0].float()
            loss = torch.nn.functional.cross_entropy(
                logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
            )
            (loss / num_supervised).backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), options["grad_norm"])))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / num_supervised)
    names = {name: name.replace(".default", "").replace("_vector.weight", "_vector") for name in trained}
    return Reference(losses, norms, {names[name]: p.detach() for name, p in trained.items()})


def reference_model(folder: Path, train_type: str, seed: int, *, dtype: torch.dtype) -> Any:
    quantized = None
    if train_type in ("qlora", "bnb_dora"):
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
    dora = train_type in ("dora", "bnb_dora")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    model = get_peft_model(model, config)
    start_adapter(model, seed=seed)
    return model


def encode(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    user = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt + answer + tokenizer.eos_token + "\n", add_special_tokens=False).input_ids
    num_prompt = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    labels = [-100] * num_prompt + ids[num_prompt:]
    after_end = len(ids) - 1 - ids[::-1].index(tokenizer.eos_token_id) + 1
    labels[after_end:] = [-100] * (len(ids) - after_end)
    return torch.tensor(ids), torch.tensor(labels)


def start_adapter(model: torch.nn.Module, *, seed: int) -> None:
    """Start from the same A matrices; B is zero in both."""
    from crosstune.core.weights import uniform_by_name

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                layer = name.removeprefix("base_model.model.").split(".lora_A.")[0]
                parameter.copy_(
                    torch.from_numpy(uniform_by_name(layer, shape=tuple(parameter.shape), seed=seed))
                )


def order_of_rows(options: dict[str, Any], num_steps: int = NUM_STEPS) -> list[list[int]]:
    """Return the rows of each step, by the documented permutation of each epoch."""
    per_step = options["batch_size"] * options["gradient_accumulation_steps"]
    epochs = [
        np.random.Generator(np.random.Philox(key=(options["seed"], epoch))).permutation(len(QUESTIONS))
        for epoch in range(-(-num_steps * per_step // len(QUESTIONS)))
    ]
    stream = np.concatenate(epochs)
    return [stream[s * per_step : (s + 1) * per_step].tolist() for s in range(num_steps)]


def run_and_reference(model: Path, data_file: Path, folder: Path, **options: Any) -> tuple[Path, Reference]:
    options = {"batch_size": 2, "lr": LR, "wd": 0.05, "grad_norm": 0.5, "seed": 3} | options
    run = train(
        make_config(
            **options,
            model_name=str(model),
            dataset=str(data_file),
            backend="cpu",
            lr_scheduler="constant",
            lora_rank=8,
            lora_alpha=16,
            max_steps=NUM_STEPS,
            skip_eval=True,
            output_dir=str(folder),
            name="run",
        )
    )
    return run.folder, reference_run(model, options, order_of_rows(options))


def column(run: Path, name: str, *, learns: bool = True) -> list[float]:
    rows = read_jsonl(run / "metrics.jsonl")
    assert not learns or abs(rows[-1]["loss"] - rows[0]["loss"]) > 0.05, (
        "a comparison of models that do not learn proves nothing"
    )
    return [row[name] for row in rows]


def check_fp32(run: Path, expected: Reference, weights_file: Path) -> None:
    """Compare within rounding: sums in another order differ by a few units of 6e-8 per step."""
    assert column(run, "loss") == pytest.approx(expected.losses, rel=1e-5)
    assert column(run, "grad_norm") == pytest.approx(expected.norms, rel=1e-3)
    assert_close_after_adam(load_file(weights_file), expected.weights, lr=LR, num_steps=NUM_STEPS)


@pytest.mark.parametrize(
    ("train_type", "precision"),
    [("qlora", "bf16"), ("dora", "bf16"), ("lora", "bf16_autocast"), ("full", "bf16_autocast")],
)
def test_bf16_stays_within_the_stated_bound(
    tiny_model: Path, data_file: Path, tmp_path: Path, train_type: str, precision: str
) -> None:
    """Both sides round in different places: PEFT multiplies adapters in fp32, crosstune in the model's dtype."""
    options = {"train_type": train_type, "precision": precision, "gradient_accumulation_steps": 1}
    run, expected = run_and_reference(tiny_model, data_file, tmp_path, **options)
    ours = column(run, "loss")
    assert ours == pytest.approx(expected.losses, rel=BF16_BOUND)
    assert ours != pytest.approx(expected.losses, rel=1e-6), "equal to the last digit: was bf16 used at all?"


@pytest.mark.parametrize(
    ("train_type", "accumulation"), [("lora", 4), ("full", 1), ("qlora", 1), ("dora", 1), ("bnb_dora", 1)]
)
def test_fp32_equals_the_reference(
    tiny_model: Path, data_file: Path, tmp_path: Path, train_type: str, accumulation: int
) -> None:
    options = {"train_type": train_type, "precision": "fp32", "gradient_accumulation_steps": accumulation}
    run, expected = run_and_reference(tiny_model, data_file, tmp_path, **options)
    [file] = (run / ("model" if train_type == "full" else "adapter")).glob("*.safetensors")
    check_fp32(run, expected, file)
