"""Allowed differences of a written tokenizer, and the dtype and size in file headers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from crosstune.core.logit_distance import measure_agreement
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.adapter_files import copy_template, copy_tokenizer, save_template
from crosstune.models.quantized_folder import dense_bytes, stored_format
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.models.weights import Tensor, write_safetensors
from crosstune.results.gguf_check import compare_answers
from crosstune.results.verify import chat_problems, largest_difference, make_prompts, report_agreement


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model without a chat template."""
    folder = make_tiny(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_base_without_a_template_may_get_that_of_its_adapter(bare: Path, tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    shutil.copytree(bare, merged)
    copy_template(adapter, merged)
    assert (merged / "chat_template.jinja").is_file()
    assert chat_problems(bare, merged) == []
    assert "the chat template renders differently" in chat_problems(merged, bare)


def test_a_trained_template_replaces_that_of_the_base(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base")
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    copy_tokenizer(base, adapter)
    shutil.copytree(base, merged)
    own = json.loads((merged / "tokenizer_config.json").read_text()) | {"chat_template": "own"}
    (merged / "tokenizer_config.json").write_text(json.dumps(own))
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    save_template(adapter, template, stop_ids={2, 0})
    copy_template(adapter, merged)
    found = Tokenizer.from_folder(merged)
    assert (found.chat_template, found.stop_ids) == (template, {0, 2})
    assert "chat_template" not in json.loads((merged / "tokenizer_config.json").read_text())
    assert chat_problems(adapter, merged) == []
    assert chat_problems(base, merged) != []


def write(folder: Path, **formats: str) -> Path:
    folder.mkdir()
    kinds = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
    tensors = [
        Tensor(name=name, dtype=kind, shape=(4, 2), rows=[np.zeros((4, 2), kinds[kind])])
        for name, kind in formats.items()
    ]
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_number_format_is_that_of_most_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "mixed", a="BF16", b="F32", c="BF16")
    assert stored_format(folder) == "bf16"
    spare = dense_bytes(folder) - (16 + 32 + 16)
    assert spare >= 0
    assert dense_bytes(folder, "fp32") - spare == 3 * 32
    assert dense_bytes(folder, "fp16") - spare == 3 * 16


def test_a_quantized_folder_counts_as_what_it_is_computed_in(tmp_path: Path) -> None:
    folder = write(tmp_path / "packed", norm="F32", **{"q.weight.packed": "F16"})
    record = {
        "format": 1,
        "spec": {"quantizer": "hqq", "bits": 4, "group_size": 64, "kind": "auto", "double": True},
        "dtype": "bfloat16",
        "layers": {"q": {"shape": [8, 8]}, "k": {"shape": [8, 8]}},
    }
    (folder / "crosstune_quantization.json").write_text(json.dumps(record))
    assert stored_format(folder) == "bf16"
    assert dense_bytes(folder, "auto") - dense_bytes(folder, "bf16") == 32 - 16
    assert dense_bytes(folder, "fp32") - dense_bytes(folder, "bf16") == 2 * (8 + 64 + 64)


def test_a_stop_token_of_minus_one_means_none(bare: Path) -> None:
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 2]}))
    assert Tokenizer.from_folder(bare).stop_ids >= {2}
    assert -1 not in Tokenizer.from_folder(bare).stop_ids


def test_an_answer_that_ends_too_early_in_llama_cpp_is_a_difference(bare: Path) -> None:
    tokenizer = Tokenizer.from_folder(bare)
    end = tokenizer.rust.token_to_id(tokenizer.eos_token)
    [word, other] = tokenizer.rust.encode("ab", add_special_tokens=False).ids[:2]
    prompt, made = [3, 4], [word, end]
    logits = np.zeros((4, 512), np.float32)
    logits[1, word] = logits[2, end] = 9.0
    counts, explained = compare_answers([(prompt, made)], [logits], 0.5, tokenizer)
    assert counts == {"compared": 1, "same": 1, "tokens": 2, "difference": ""} and explained
    logits[2, other] = 9.5  # nearly the same: rounding may choose either
    counts, explained = compare_answers([(prompt, made)], [logits], 0.5, tokenizer)
    assert counts["same"] == 0 and explained
    logits[2, other] = 12.0
    counts, explained = compare_answers([(prompt, made)] * 2, [logits] * 2, 0.5, tokenizer)
    assert counts["same"] == 0 and not explained
    words = [repr(tokenizer.decode([each], keep_special=True)) for each in (word, end, other)]
    assert counts["difference"] == "after {}, llama.cpp continues with {} instead of {}".format(*words)


def test_the_surest_token_that_a_result_replaces_is_shown(bare: Path) -> None:
    tokenizer = Tokenizer.from_folder(bare)
    prompt = tokenizer.rust.encode("ab cd", add_special_tokens=False).ids
    own = [np.zeros((len(prompt), 512), np.float32) for _ in range(2)]
    for each in own:
        each[:, 40] = 1.0
    own[1][1, 40] = 5.0
    assert largest_difference(bare, [prompt] * 2, own, own) == ""
    other = [each.copy() for each in own]
    other[0][0, 41] = other[1][1, 42] = 9.0
    words = [repr(tokenizer.decode([*ids], keep_special=True)) for ids in (prompt[:2], [42], [40])]
    expected = "after {}, it continues with {} instead of {}".format(*words)
    found = largest_difference(bare, [prompt] * 2, own, other)
    assert found == expected
    report = report_agreement(measure_agreement(own, other), "fp32", difference=found)
    assert report["agreement"]["difference"] == expected and not report["verified"]


def test_logits_are_compared_on_the_last_answers_of_the_run_too(bare: Path) -> None:
    samples = [
        {"prompt": "Say a", "answer": "first"},
        {"prompt": "Look", "answer": "red", "pictures": ["a.png"]},
    ]
    samples += [
        {"prompt": "Say a", "answer": "a"},
        {"prompt": 5, "answer": "b"},
        {"prompt": "c" * 3000, "answer": "c"},
    ]
    fixed, found = make_prompts(bare), make_prompts(bare, samples)
    assert found[: len(fixed)] == fixed
    [own] = found[len(fixed) :]
    text = Tokenizer.from_folder(bare).decode(own, keep_special=True)
    assert "Say a" in text and text.endswith("a") and "first" not in text
