"""Every family's GGUF file computes the model in llama.cpp: same tokens, logits within the format, same answers."""

from __future__ import annotations

import collections
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import peft
import pytest
import tokenizers
import torch
from gguf_models import ADDED, FAMILIES, SPECIAL, make_texts, write_family
from transformers import AutoModelForCausalLM

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.core.logit_distance import measure_agreement
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models import gguf_families, gguf_writer, llama_cpp
from crosstune.results.gguf_export import write_modelfile
from crosstune.torch_engine.model_folders import input_squares

gguf = pytest.importorskip("gguf", reason="needs the extra crosstune[gguf]")
pytest.importorskip("xllamacpp", reason="needs the extra crosstune[llamacpp]")
FEW = ("qwen2", "gemma-3")
"""In the normal tier."""
# Measured on these random models, doubled. Half of a 4-bit error is llama.cpp's 8-bit activations.
BOUNDS = {"f32": 1e-3, "bf16": 0.02, "q8_0": 0.08, "q4_k_m": 0.6}
WITH_EXPERTS = {"f32": 1e-3, "bf16": 0.2, "q8_0": 0.4, "q4_k_m": 0.9}
"""Rounding changes which experts a token uses."""


def decode(data: Any, kind: str) -> Any:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


def export(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["export", *words, "--to", "gguf", "--json", "--backend", "cpu"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    report: dict[str, Any] = json.loads(printed.out)
    return report | {"said": printed.err}


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
    if kind == "tekken":  # llama.cpp's pattern has neither combining marks nor capitals beyond ASCII
        rare = ("Mn", "Mc", "Me", "Lu", "Lt")
        texts = [t for t in texts if not any(c > "\x7f" and category(c) in rare for c in t)]
    ids = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    prompt = [1, *(token for each in ids[:8] for token in each)][:64]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def own(tokens: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    experts = FAMILIES[name][0] in ("mixtral", "qwen3_moe")
    for form, bound in (WITH_EXPERTS if experts else BOUNDS).items():
        path = tmp_path / f"{form}.gguf"
        gguf_writer.write_gguf(folder, path, kind=form)
        checked = texts if form == "bf16" else texts[:20]
        found = llama_cpp.ask(
            path, texts=checked, prompts=[prompt], starts=[prompt[:30]], max_new_tokens=12, tokens=range(9)
        )
        for text, ours, theirs in zip(checked, ids, found.tokens, strict=False):
            assert theirs == ours, text
        agreement = measure_agreement([own(prompt)], found.logits)
        assert agreement.relative < bound, (form, agreement)
        assert found.ends == [2, 3, 5, 7] and found.special["eos"] == 7 and not found.adds_bos
        assert found.template == (folder / "chat_template.jinja").read_text()
        if form == "f32" or (form == "bf16" and not experts):
            answer = found.continuations[0]
            logits = own([*prompt[:30], *answer])[29:-1]
            chosen = logits.argmax(-1)
            assert len(answer) == 12 or answer[-1] in found.ends, "it ended at an end token"
            places = np.arange(len(answer))
            gaps = logits[places, chosen] - logits[places, answer]
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


@pytest.mark.slow
def test_a_run_is_checked_with_its_own_rows_and_gets_the_smallest_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Say {n} twice.", "completion": f"{n} {n}, größer als {n - 1}."} for n in range(40)]
    data, run = tmp_path / "rows.jsonl", tmp_path / "runs" / "mine"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name", "tiny-random", "--dataset", str(data), "--max_steps", "1", "--num_samples", "3"]
    words += ["--max_new_tokens", "2", "--backend", "cpu", "--output_dir", str(run.parent)]
    assert main(["train", *words, "--run_name", "mine"]) == 0
    capsys.readouterr()
    bound = 3e-5
    report = export(capsys, str(run), "--max_kl", str(bound))
    trials, chosen = report["trials"], report["chosen"]
    assert not re.search(r"measure .*: (\d+)/\1 rows(?!, KL)", report["said"]), (
        "the end of each is its divergence"
    )
    assert chosen["kl"] <= bound < max(trial["kl"] for trial in trials)
    assert chosen["bytes"] == min(trial["bytes"] for trial in trials if trial["kl"] <= bound)
    stored = gguf.GGUFReader(run / "gguf-auto" / report["file"]).tensors
    assert sum(int(tensor.n_bytes) for tensor in stored) == chosen["bytes"]
    found = report["llama_cpp"]
    assert found["texts"]["of_run"] > 36, "the training rows and the samples"
    assert found["answers"]["compared"] == 3 and found["on_run_prompts"]["verified"]
    exact = report["unquantized"]
    assert exact["on_run_prompts"]["agreement"]["relative"] < 1e-3 and exact["answers"]["same"] == 3

    assert main(["export", str(run), "--to", "gguf", "--gguf_type", "q8_0", "--max_kl", "1"]) == 2
    assert "--gguf_type q8_0 is the type" in capsys.readouterr().err
    data.unlink()
    command = ["export", str(run), "--to", "gguf", "--max_kl", "1", "--out", str(tmp_path / "no")]
    assert main([*command, "--backend", "cpu"]) == 2
    assert (
        "Cannot choose a GGUF type by --max_kl" in capsys.readouterr().err and not (tmp_path / "no").exists()
    )
    report = export(capsys, str(run), "--out", str(tmp_path / "without"))
    assert any("the run's data cannot be read" in each for each in report["warnings"])
    assert report["llama_cpp"]["answers"]["compared"] == 3, "the samples are recorded in the run"


def test_an_adapter_alone_computes_the_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interleaved queries, grouped keys and rank-stabilized scale, applied by llama.cpp."""
    folder = write_family("llama-3", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=8, lora_alpha=12, use_rslora=True, target_modules=targets, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(0.05 * torch.randn_like(weight))
    adapted.save_pretrained(tmp_path / "adapter")
    words = [str(tmp_path / "adapter"), "--base", str(folder)]
    report = export(capsys, *words, "--adapter_only", "--gguf_type", "q8_0", "--out", str(tmp_path / "out"))
    assert report["warnings"][-1] == "--gguf_type has no effect with --adapter_only"
    found = report["llama_cpp"]
    assert found["agreement"]["relative"] < 1e-3 and found["answers"]["same"] == found["answers"]["compared"]
    bare = tmp_path / "base.gguf"
    gguf_writer.write_gguf(folder, bare, kind="f32")
    prompt = [1, 40, 41, 42, 43]
    answers = [
        llama_cpp.ask(bare, prompts=[prompt], adapter=adapter).logits
        for adapter in (None, tmp_path / "out" / report["file"])
    ]
    with torch.no_grad():
        wanted = adapted.eval()(torch.tensor([prompt])).logits[0].numpy()
    assert measure_agreement([wanted], answers[1]).relative < 1e-4 < 0.1
    assert measure_agreement([wanted], answers[0]).relative > 0.1, "the adapter changes the model"

    file = tmp_path / "adapter" / "adapter_config.json"
    assert main(["export", *words, "--to", "vllm"]) == 0
    said = capsys.readouterr().out
    assert f"vllm serve {folder} --enable-lora --max-lora-rank 8 --lora-modules adapter=" in said
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    for form in (["vllm"], ["gguf", "--adapter_only"]):
        assert main(["export", *words, "--to", *form, "--out", str(tmp_path / "no"), "--backend", "cpu"]) == 2
        assert "DoRA" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_ollama_gets_a_modelfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_family("smollm2", tmp_path / "model", dtype=torch.bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 4]}))
    words = ["export", str(folder), "--to", "ollama", "--gguf_type", "q8_0", "--out", str(tmp_path / "o")]
    assert main([*words, "--backend", "cpu"]) == 0
    assert f"ollama create o -f {tmp_path / 'o' / 'Modelfile'}" in capsys.readouterr().out
    turn = "<|im_start|>{}\n{{{{ .Content }}}}<|im_end|>\n"
    cases = "".join(
        f'{{{{ {"else " if n else ""}if eq .Role "{role}" }}}}{turn.format(role)}'
        for n, role in enumerate(("system", "user", "assistant"))
    )
    assert (tmp_path / "o" / "Modelfile").read_text() == (
        "FROM ./model-q8_0.gguf\n"
        f'TEMPLATE """{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "<|im_end|>"\nPARAMETER stop "<|user|>"\n'
    )


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("qwen2_5", "You are a helpful assistant."),
        ("granite", "You are Granite."),
        ("phi4", ""),
        ("qwen3", None),
    ],
)
def test_a_modelfile_has_the_system_message_that_the_template_adds(
    name: str, system: str | None, tmp_path: Path
) -> None:
    folder = write_family("smollm2", tmp_path / "model")
    template = Path(__file__).parents[1] / "chat_templates" / f"{name}.jinja"
    tokenizer = replace(Tokenizer.from_folder(folder), chat_template=template.read_text())
    said = write_modelfile(tmp_path, "m.gguf", tokenizer)
    found = (tmp_path / "Modelfile").read_text()
    assert ("TEMPLATE" in found) == (not said) == (system is not None)
    assert ("SYSTEM" in found) == bool(system)
    assert not system or f'\nSYSTEM """{system}"""\n' in found


def test_files_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise SystemExit('a file of the user ran')")
    folder = write_family("smollm2", tmp_path / "model")
    gguf_writer.write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    monkeypatch.chdir(tmp_path)
    assert llama_cpp.ask(Path("m.gguf"), texts=["a"]).tokens


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_weights_that_a_type_cannot_hold(bad: float) -> None:
    values = np.zeros((4, 256), np.float32)
    values[2] = 3.0  # constant and zero rows are fine
    for kind in ("F16", "Q8_0", "Q4_0", "Q4_K", "Q3_K", "IQ4_XS", "Q6_K"):
        found = decode(gguf_writer.encode(values, kind, name="x"), kind)
        np.testing.assert_allclose(found, values, rtol=0.02)
        broken = values.copy()
        broken[1, 7] = bad
        with pytest.raises(UserError, match="beyond the range of fp16" if bad == 1e6 else "NaN or infinite"):
            gguf_writer.encode(broken, kind, name="x")


def test_the_recipe_is_that_of_llama_cpp() -> None:
    """Types that llama-quantize gives a Llama of 32 layers with 8 key heads, by the rules in llama.cpp's source of August 2026."""
    recipe = gguf_writer.Recipe(kind="q4_k_m", num_layers=32, num_groups=4)
    more = [
        layer for layer in range(32) if recipe.type_of(f"blk.{layer}.ffn_down.weight", (9, 512)) == "Q6_K"
    ]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert recipe.type_of("blk.4.attn_v.weight", (9, 512)) == "Q4_K"
    assert recipe.type_of("output.weight", (9, 512)) == "Q6_K"
    assert recipe.type_of("token_embd.weight", (9, 512)) == "Q4_K"
    assert recipe.type_of("blk.4.ffn_up.weight", (9, 288)) == "Q5_0", "32 divides a row, 256 does not"
    assert recipe.type_of("blk.4.ffn_up.weight", (9, 72)) == "F16"
    assert recipe.type_of("blk.4.attn_norm.weight", (512,)) == "F32"
    few = gguf_writer.Recipe(kind="q3_k_m", num_layers=32, num_groups=4)
    assert [few.type_of(f"blk.{n}.attn_v.weight", (9, 512)) for n in (0, 1, 2)] == ["Q5_K", "Q5_K", "Q4_K"]
    assert few.type_of("blk.9.attn_output.weight", (9, 512)) == "Q4_K"
    eight = gguf_writer.Recipe(kind="q4_k_m", num_layers=32, num_groups=4, num_experts=8)
    assert eight.type_of("blk.9.attn_k.weight", (9, 512)) == "Q8_0"


_Q3 = {("attn_output", "Q4_K"): 1.0, ("attn_v", "Q4_K"): 1.0, ("ffn_down", "Q4_K"): 1.0}
_HALF = {("attn_v", "Q6_K"): 0.5, ("ffn_down", "Q6_K"): 0.5}
SNAPSHOTS = {
    (28, 2, False): {"q3_k_m": ({("attn_v", "Q5_K"): 2, ("ffn_down", "Q5_K"): 1}, _Q3), "iq4_xs": ({("ffn_down", "Q5_K"): 3}, {})},
    (34, 2, True): {"q3_k_m": ({("attn_v", "Q5_K"): 2, ("ffn_down", "Q5_K"): 2}, _Q3), "iq4_xs": ({("ffn_down", "Q5_K"): 4}, {})},
    (80, 8, False): {
        "q3_k_m": ({("attn_v", "Q5_K"): 80, ("ffn_down", "Q5_K"): 5}, _Q3),
        "q4_k_m": ({("attn_v", "Q5_K"): 40}, _HALF),
        "iq4_xs": ({("attn_v", "Q5_K"): 80, ("ffn_down", "Q5_K"): 10}, {}),
    },
}  # fmt: skip
"""Layers, heads per key, tied embeddings -> type -> the number of tensors that differ from its main type; then, for those
that fill the rest, their share. Counted in llama.cpp's own snapshots (tests/snapshots, August 2026) of Qwen3 0.6B, Gemma 3
4B and Llama 3.1 70B."""


@pytest.mark.parametrize("kind", ["q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs"])
@pytest.mark.parametrize("facts", SNAPSHOTS)
def test_types_are_those_of_the_snapshots_of_llama_cpp(facts: tuple[int, int, bool], kind: str) -> None:
    num_layers, num_groups, tied = facts
    recipe = gguf_writer.Recipe(kind=kind, num_layers=num_layers, num_groups=num_groups, tied=tied)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down")
    main_type = gguf_writer.RECIPES[kind]
    found = collections.Counter(
        (part, recipe.type_of(f"blk.{layer}.{part}.weight", (9, 1024)))
        for layer in range(num_layers)
        for part in parts
    )
    special, rest = SNAPSHOTS[facts].get(kind, ({}, _HALF if kind in ("q4_k_m", "q5_k_m") else {}))
    wanted = collections.Counter(special)
    for (part, other), share in rest.items():
        taken = sum(count for (name, _), count in special.items() if name == part and share == 1.0)
        wanted[part, other] = int(share * num_layers) - taken
    for part in parts:
        wanted[part, main_type] += num_layers - sum(
            count for (name, _), count in wanted.items() if name == part
        )
    assert found == +wanted
    head = "token_embd.weight" if tied else "output.weight"
    assert recipe.type_of(head, (9, 1024)) == "Q6_K"
    assert tied or recipe.type_of("token_embd.weight", (9, 1024)) == main_type


def test_types_for_rows_that_256_does_not_divide_are_quantized_as_in_llama_cpp() -> None:
    """SmolLM2 has rows of 576 weights."""
    values = np.random.default_rng(0).standard_normal((32, 576)).astype(np.float32)
    for kind, fallback in (("q4_k_m", "Q5_0"), ("q5_k_m", "Q5_1"), ("q6_k", "Q8_0"), ("q3_k_m", "Q4_0")):
        recipe = gguf_writer.Recipe(kind=kind, num_layers=30, num_groups=3, tied=True)
        assert recipe.type_of("blk.9.ffn_up.weight", (9, 576)) == fallback
        assert recipe.type_of("token_embd.weight", (9, 576)) == "Q8_0"
        number = gguf.GGMLQuantizationType[fallback]
        ours = gguf_writer.encode(values, fallback, name="x")
        theirs = llama_cpp.quantize_rows(values, number, gguf_writer.size_of(fallback, values.shape[-1:]))
        np.testing.assert_allclose(decode(ours, fallback), decode(theirs, fallback), atol=1e-6)


def test_the_page_adds_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/internals/add-a-gguf-family.md, followed: its entry is all that Gemma 1 needs."""
    page = Path(__file__).parents[2] / "docs" / "internals" / "add-a-gguf-family.md"
    entry = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert entry is not None
    ((kind, family),) = eval("{" + entry[1] + "}", {"Family": gguf_families.Family}).items()
    monkeypatch.setitem(FAMILIES, kind, (kind, "never", {"head_dim": 64}))
    folder = write_family(kind, tmp_path / "model")
    words = [str(folder), "--gguf_type", "f32", "--out", str(tmp_path / "out")]
    assert main(["export", *words, "--to", "gguf", "--backend", "cpu"]) == 2
    assert "its model_type is 'gemma'" in capsys.readouterr().err
    monkeypatch.setitem(gguf_families.FAMILIES, kind, family)
    report = export(capsys, *words)
    assert report["agreement"]["relative"] < 2e-3 and report["llama_cpp"]["answers"]["same"] == 3


def test_an_importance_matrix_lowers_the_error_where_it_weighs(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = draw.standard_normal((64, 512)).astype(np.float32)
    weights = np.exp(2 * draw.standard_normal(512)).astype(np.float32)

    def error(importance: Any) -> float:
        packed = gguf_writer.encode(values, "Q4_K", name="x", importance=importance)
        return float((weights * (decode(packed, "Q4_K") - values) ** 2).sum())

    assert error(weights) < 0.8 * error(None)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    layer.forward = lambda input_ids: layer[0](
        input_ids.float()[..., None] * torch.tensor([1.0, 0.0, 2.0, 3.0])
    )  # type: ignore[method-assign]
    found = input_squares(layer, [[1, 2], [3], [5, 1]], device=torch.device("cpu"))
    np.testing.assert_allclose(found["0"], np.array([1, 0, 4, 9]) * (1 + 4 + 9 + 25 + 1) / 5, rtol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1e-38, 1e37])
def test_columns_without_importance_keep_their_values(weight: float) -> None:
    values = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    importance = np.array([weight] * 256 + [1.0] * 256, np.float32)
    for kind in ("Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"):
        wanted, found = (
            np.square(decode(gguf_writer.encode(values, kind, name="x", importance=each), kind) - values)
            for each in (None, importance)
        )
        assert found.sum() < 1.3 * wanted.sum(), kind
