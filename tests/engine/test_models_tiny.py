"""The tiny random model loads in transformers and behaves like a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstune.models.locate import shape
from crosstune.models.tiny import CHATML, tiny_model

torch = pytest.importorskip("torch", reason="needs the extra crosstune[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra crosstune[torch]")


def test_weights_and_tokenizer_load(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    found = shape(str(folder))
    assert found is not None
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters()) == 139_584
    assert 0.019 < model.lm_head.weight.std().item() < 0.021
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    assert len(tokenizer) == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)

    chat = [{"role": "user", "content": "Count to 10, ünïcödé 日本 🙂"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nCount to 10, ünïcödé 日本 🙂<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(tokens.input_ids[0]) == text
    assert torch.isfinite(model(**tokens).logits).all()
    assert tokenizer.chat_template == CHATML


def test_the_seed_decides_and_sizes_can_change(tmp_path: Path) -> None:
    first, same, other = (
        tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    names = sorted(path.name for path in first.iterdir())
    assert all((first / name).read_bytes() == (same / name).read_bytes() for name in names)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()

    changed = tiny_model(
        tmp_path / "d", vocab=400, hidden=32, num_layers=3, num_heads=2, num_kv_heads=1, tied=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(changed)
    assert model.lm_head.weight.shape == (400, 32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert len(model.model.layers) == 3
    assert json.loads((changed / "config.json").read_text())["head_dim"] == 16
