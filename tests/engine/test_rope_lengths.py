"""Models whose rotary frequencies depend on the longest row of a micro-batch: the plan says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from crosstune.config.load import make_config
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import check_model, warn_of_rope

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.5}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}


def long_rope() -> hf.Phi3Config:
    return hf.Phi3Config(
        **SHAPE, max_position_embeddings=64, original_max_position_embeddings=16, rope_scaling=dict(LONG)
    )


def warnings(config: Any, **options: Any) -> list[str]:
    return warn_of_rope(config, plan=make_plan(make_config(backend="cpu", precision="fp32", **options)))


def test_a_long_row_changes_the_row_beside_it_and_the_check_of_the_model_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(long_rope(), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    rows = torch.randint(1, 64, (2, 24))
    with torch.no_grad():
        together = model(input_ids=rows).logits[0, :16]
        alone = model(input_ids=rows[:1, :16]).logits[0]
    assert (together - alone).abs().max() > 1e-3, "transformers has changed: the warning can go"
    options = {"backend": "cpu", "precision": "fp32", "model_name": str(tmp_path), "batch_size": 2}
    for train_type in ("lora", "full"):
        plan = make_plan(make_config(**options, train_type=train_type, context_length=24))
        [said] = check_model(tmp_path, plan=plan)
        assert "beyond 16 tokens" in said and "longrope" in said and "--batch_size 1" in said


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"batch_size": 2, "context_length": 16}, False),
        ({"batch_size": 1, "context_length": 24}, False),
        ({"batch_size": 1, "context_length": 24, "packing": True}, True),
        ({"batch_size": "auto", "context_length": 24}, True),
    ],
)
def test_rows_that_cannot_be_longer_or_are_alone(options: dict[str, Any], warned: bool) -> None:
    assert bool(warnings(long_rope(), **options)) == warned


def test_other_kinds_of_frequencies() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    llama = hf.LlamaConfig(**SHAPE, max_position_embeddings=32, rope_scaling=dynamic)
    assert warnings(llama, batch_size=2, context_length=64) and not warnings(llama, context_length=32)
    assert not warnings(llama, batch_size=1, context_length=64)
    fixed = {"rope_type": "linear", "factor": 2.0}
    assert not warnings(
        hf.LlamaConfig(**SHAPE, max_position_embeddings=32, rope_scaling=fixed), context_length=64
    )
    assert not warnings(hf.Gemma3TextConfig(**SHAPE, head_dim=8), batch_size=4, context_length=2**18)
