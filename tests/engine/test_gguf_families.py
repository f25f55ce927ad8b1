"""Every family's GGUF file computes the model in llama.cpp: same tokens, logits within the format, same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf_models import ADDED, FAMILIES, SPECIAL, make_texts, write_family
from transformers import AutoModelForCausalLM

from crosstune.cli.main import main
from crosstune.core.logit_distance import measure_agreement
from crosstune.models import gguf_types, gguf_writer, llama_cpp

pytest.importorskip("gguf", reason="needs the extra crosstune[gguf]")
pytest.importorskip("xllamacpp", reason="needs the extra crosstune[llamacpp]")
FEW = ("qwen2", "gemma-3")
"""In the normal tier."""
# Measured on these random models, doubled. Half of a 4-bit error is llama.cpp's 8-bit activations.
BOUNDS = {"f32": 1e-3, "bf16": 0.02, "q8_0": 0.08, "q4_k_m": 0.6}


def export(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["export", *words, "--to", "gguf", "--json", "--backend", "cpu"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    report: dict[str, Any] = json.loads(printed.out)
    return report


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FEW else pytest.mark.slow) for each in FAMILIES]
)
def test_a_family_in_llama_cpp(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [token for token in (*SPECIAL, *ADDED) if tokenizer.token_to_id(token) is not None]
    texts = make_texts(60 if name in FEW else 1000, special=special)
    kind = FAMILIES[name][1]
    if kind == "first":  # llama.cpp has no space at the beginning only; chats begin with the bos token
        texts = [f"<s>{text}" for text in texts]
    if kind == "phi3":  # llama.cpp strips ASCII spaces after a special token, transformers all
        texts = [text.replace("\u3000", " ").replace("\u00a0", " ") for text in texts]
    if kind == "tekken":  # llama.cpp's pattern has no combining marks
        texts = [text for text in texts if not any("\u0900" <= letter <= "\u097f" for letter in text)]
    ids = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    prompt = [1, *(token for each in ids[:8] for token in each)][:64]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def own(tokens: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    for form, bound in BOUNDS.items():
        path = tmp_path / f"{form}.gguf"
        gguf_writer.write_gguf(folder, path, kind=form)
        checked = texts if form == "bf16" else texts[:20]
        found = llama_cpp.ask(
            path, texts=checked, prompts=[prompt], starts=[prompt[:30]], max_new_tokens=12, tokens=range(9)
        )
        for text, ours, theirs in zip(checked, ids, found.tokens, strict=False):
            assert theirs == ours, text
        agreement = measure_agreement([own(prompt)], found.logits)
        print(name, form, agreement.relative)
        assert agreement.relative < bound, (form, agreement)
        assert found.ends == [2, 3, 5, 7] and found.special["eos"] == 7 and not found.adds_bos
        assert found.template == (folder / "chat_template.jinja").read_text()
        if form in ("f32", "bf16"):
            answer = found.continuations[0]
            assert len(answer) == 12
            logits = own([*prompt[:30], *answer])[29:-1]
            chosen = logits.argmax(-1)
            gaps = logits[np.arange(12), chosen] - logits[np.arange(12), answer]
            assert (gaps <= 2 * agreement.max_abs).all(), "greedy tokens differ by more than rounding"
            if form == "f32":
                assert answer == chosen.tolist()
        path.unlink()


def test_export_shows_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_family("qwen3", tmp_path / "model", dtype=torch.bfloat16)
    report = export(capsys, str(folder), "--gguf_type", "q4_k_m", "--out", str(tmp_path / "out"))
    assert report["checked_by"] == "llama.cpp" and report["verified"]
    texts, exact = report["llama_cpp"]["texts"], report["unquantized"]
    assert texts["same"] >= texts["compared"] - 6 and exact["verified"]  # at most the rare scripts
    assert exact["agreement"]["relative"] < 0.02 < report["agreement"]["relative"] < 0.4
    assert any("NFC" in sentence for sentence in report["warnings"])
    assert exact["answers"]["same"] == exact["answers"]["compared"] == 3
