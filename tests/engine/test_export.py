"""Exported models have the trained logits when other tools load them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from support import train_step
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, Qwen3MoeConfig

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.data.batches.token_batch import TokenBatch, pad_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models import gguf_families, gguf_writer, llama_cpp
from crosstune.models.locate import locate
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import open_session as open_torch

TURNS = [{"role": "user", "content": "Say 42 and blue."}, {"role": "assistant", "content": "42, blue."}]


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    example = encode_conversation(TURNS, Tokenizer.from_folder(tiny_model), index=0, whole=False)
    return [pad_rows([example], pad_id=0)]


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, window: list[TokenBatch], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """An adapter folder, and the logits of the session that made it."""
    config = make_config(backend="cpu", precision="fp32", model_name=str(tiny_model), lora_rank=4)
    session = open_torch(make_plan(config), model_folder=tiny_model)
    for _ in range(4):
        train_step(session, window, lr=1e-2)
    adapter = session.save_result(tmp_path_factory.mktemp("run"))
    return adapter, logits(session.model, window)


def logits(model: Any, window: list[TokenBatch]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(window[0].input_ids).long()).logits


def save(model: Any, folder: Path, *, tokenizer: Path) -> None:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())


def export(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["export", *words, "--json", "--backend", "cpu"]) == 0
    printed = capsys.readouterr()
    report: dict[str, Any] = json.loads(printed.out)
    assert report["verified"]
    for line in printed.err.splitlines():
        labels = ("export: ", "model  ", "check  ", "  ", "warning  ", "changed  ", "chosen  ")
        assert line.startswith(labels), line
    return report


def test_hf(
    trained: tuple[Path, torch.Tensor],
    window: list[TokenBatch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter, expected = trained
    report = export(capsys, str(adapter), "--to", "hf", "--n_bits", "4", "--out", str(tmp_path / "hf"))
    assert "--n_bits has no effect with --to hf" in report["warnings"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(loaded, window), expected, rtol=0, atol=1e-4)


def test_new_blocks_over_a_quantized_base(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        backend="cpu",
        precision="fp32",
        model_name=str(tiny_model),
        train_type="hqq_llama_pro",
        n_bits=2,
        num_new_blocks=2,
    )
    session = open_torch(make_plan(config), model_folder=tiny_model)
    for _ in range(4):
        train_step(session, window, lr=1e-2)
    saved = session.save_result(tmp_path)
    expected = logits(session.model, window)
    measured = json.loads((saved / "crosstune.json").read_text())["against_trained"]["original"]["relative"]
    assert 0.1 < measured < 2
    plain = export(capsys, str(saved), "--to", "hf", "--out", str(tmp_path / "plain"))
    assert plain["against_trained"]["original"]["relative"] > 0.1
    assert any("--into dequantized" in sentence for sentence in plain["warnings"])
    seen = export(capsys, str(saved), "--to", "hf", "--into", "dequantized", "--out", str(tmp_path / "seen"))
    assert not seen["warnings"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "seen")
    torch.testing.assert_close(logits(loaded, window), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "bound"), [("f32", 1e-4), ("q8_0", 5e-2)])
def test_gguf_comes_back_through_both_readers(
    trained: tuple[Path, torch.Tensor],
    window: list[TokenBatch],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    bound: float,
) -> None:
    adapter, expected = trained
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    report = export(
        capsys, str(adapter), "--to", "gguf", "--gguf_type", kind, "--out", str(tmp_path / "gguf")
    )
    assert report["own_reader"]["verified"] and report["checked_by"] == "transformers"
    assert report["own_reader"]["agreement"]["relative"] < (1e-4 if kind == "f32" else 0.1)
    file = tmp_path / "gguf" / report["file"]
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    torch.testing.assert_close(logits(theirs, window), expected, rtol=0, atol=bound)
    folder = locate(str(file)).path
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(ours, window), expected, rtol=0, atol=bound)
    before, after = Tokenizer.from_folder(tiny_model), Tokenizer.from_folder(folder)
    for text in ("What is 42 + 1?", "<|im_start|>user\nBlue.<|im_end|>", "ümlaut 🚢\n\n  x"):
        assert after.encode(text).ids == before.encode(text).ids
    assert (after.chat_template, after.bos_token, after.eos_token) == (
        before.chat_template,
        before.bos_token,
        before.eos_token,
    )


def test_a_file_name_gives_the_gguf_file_itself(
    trained: tuple[Path, torch.Tensor],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    Path("model-f32.gguf").write_bytes(b"another model, which transformers would read")
    out = tmp_path / "mine.gguf"
    command = ["export", str(trained[0]), "--to", "gguf", "--out", str(out), "--backend", "cpu"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"written  {out}\n" in said and said.rstrip().endswith(f"llama-cli -m {out} -cnv")
    assert out.read_bytes()[:4] == b"GGUF"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.gguf"]
    before = out.stat().st_mtime_ns
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err and out.stat().st_mtime_ns == before
    assert main(["export", str(trained[0]), "--to", "hf", "--out", str(tmp_path / "x.gguf")]) == 2
    assert "is a GGUF file name, but --to hf writes a folder" in capsys.readouterr().err


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_gguf_adds_the_bos_token_of_its_prompts(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], writes_bos: bool
) -> None:
    """llama.cpp would add the token to every prompt, even if the chat template, and so the training, has none."""
    import gguf

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    bos = [("<|im_start|>", rust.token_to_id("<|im_start|>"))]
    rust.post_processor = TemplateProcessing(single=f"{bos[0][0]} $A", special_tokens=bos)
    rust.save(str(folder / "tokenizer.json"))
    source = "{{ messages[0].content }}:"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" * writes_bos + source)
    assert Tokenizer.from_folder(folder).adds_bos
    export(capsys, str(folder), "--to", "gguf", "--out", str(tmp_path / "gguf"))
    [file] = (tmp_path / "gguf").glob("*.gguf")
    assert bool(gguf.GGUFReader(file).fields["tokenizer.ggml.add_bos_token"].parts[-1][0]) == writes_bos


def test_a_tied_gguf_has_no_output_weight(tmp_path: Path) -> None:
    import gguf

    folder = make_tiny(tmp_path / "tied", tied=True, vocab=600)
    told: list[tuple[int, int | None]] = []
    show = lambda stage, done, total: told.append((done, total))  # noqa: E731
    gguf_writer.write_gguf(folder, tmp_path / "t.gguf", kind="f32", progress=show)
    done, total = told[-1]
    size = (tmp_path / "t.gguf").stat().st_size
    assert done == total and 0.5 * size < done <= size, "bytes, not weights"
    reader = gguf.GGUFReader(tmp_path / "t.gguf")
    names = {tensor.name for tensor in reader.tensors}
    assert "output.weight" not in names and "token_embd.weight" in names
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 600


def test_a_wrong_layout_is_kept_as_unverified(
    trained: tuple[Path, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gguf_families, "_interleaved", lambda values, heads: values)
    out = tmp_path / "gguf"
    assert main(["export", str(trained[0]), "--to", "gguf", "--out", str(out), "--backend", "cpu"]) == 2
    assert "beyond the bound" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["gguf.unverified"]


def test_gguf_needs_a_known_family(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPTNeoXConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    folder = tmp_path / "neox"
    save(AutoModelForCausalLM.from_config(config), folder, tokenizer=tiny_model)
    assert main(["export", str(folder), "--to", "gguf", "--backend", "cpu"]) == 2
    answer = capsys.readouterr().err
    assert "'gpt_neox'" in answer and "supported: gemma2, gemma3_text, granite, llama" in answer
    assert [path.name for path in tmp_path.iterdir()] == ["neox"]


@pytest.mark.parametrize(("bits", "bound"), [(16, 1e-3), (8, 0.05)])
def test_mlx(
    trained: tuple[Path, torch.Tensor],
    window: list[TokenBatch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    bits: int,
    bound: float,
) -> None:
    mx = pytest.importorskip("mlx.core", reason="needs the extra crosstune[mlx]")
    mlx_lm = pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    adapter, expected = trained
    out = tmp_path / "mlx"
    report = export(capsys, str(adapter), "--to", "mlx", "--n_bits", str(bits), "--out", str(out))
    assert report["n_bits"] == bits
    model = mlx_lm.load(str(out))[0]
    found = np.array(model(mx.array(window[0].input_ids)).astype(mx.float32))
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=bound)


def test_scaled_rope_reaches_mlx(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 writes rope_parameters, mlx-lm reads rope_theta and rope_scaling."""
    pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 250.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    save(model, tmp_path / "model", tokenizer=tiny_model)
    assert "rope_theta" not in json.loads((tmp_path / "model" / "config.json").read_text())
    for form in ("mlx", "hf"):
        words = ["--to", form, "--dtype", "fp32", "--out", str(tmp_path / form)]
        report = export(capsys, str(tmp_path / "model"), *words)
        assert report["agreement"]["relative"] < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_neox"])
def test_mlx_reads_the_names_of_transformers_5(
    kind: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm reads num_experts and head_dim, rotary_emb_base and rotary_pct; transformers 5 writes none of them."""
    pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    configs = {
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **sizes, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        ),
        "gpt_neox": lambda: GPTNeoXConfig(
            **sizes,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
    }
    model = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    save(model, tmp_path / "model", tokenizer=tiny_model)
    words = ["--to", "mlx", "--dtype", "fp32", "--out", str(tmp_path / "mlx")]
    report = export(capsys, str(tmp_path / "model"), *words)
    assert report["agreement"]["relative"] < 1e-4


def test_few_bits_do_not_hide_a_wrong_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    wrong = {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    monkeypatch.setattr("crosstune.models.folder.add_config_aliases", lambda config: config | wrong)
    words = ["export", str(tiny_model), "--to", "mlx", "--n_bits", "4", "--out", str(tmp_path / "out")]
    assert main([*words, "--backend", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "even before quantization" in said
    assert "computes the model differently" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out.unverified"]


@pytest.mark.parametrize(
    ("kind", "window"), [("mistral", 16), ("gemma2", 16), ("phi3", 16), ("mistral", 200)]
)
def test_a_window_that_mlx_lm_ignores(
    kind: str, window: int, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm attends to everything: the model and an adapter of it are refused alike, or allowed within the window."""
    pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    model = tiny_of_kind(kind, sliding_window=window)
    save(model, tmp_path / "model", tokenizer=tiny_model)
    peft.get_peft_model(
        model, peft.LoraConfig(use_dora=True, r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    ).save_pretrained(tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    named = {"base_model_name_or_path": str(tmp_path / "model")}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    for words in (["export", "model", "--dtype", "fp32"], ["export", "adapter"], ["convert", "adapter"]):
        out = tmp_path / f"{words[0]}-{words[1]}"
        command = [words[0], str(tmp_path / words[1]), *words[2:], "--to", "mlx", "--out", str(out)]
        code = main([*command, "--backend", "cpu"])
        said = "".join(capsys.readouterr())
        assert code == (2 if window == 16 else 0), said
        assert f"sliding window of {window} tokens" in said
        assert "bug" not in said
        assert out.exists() == (window != 16)


def tiny_of_kind(kind: str, **options: Any) -> Any:
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(kind, **sizes, pad_token_id=0, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
