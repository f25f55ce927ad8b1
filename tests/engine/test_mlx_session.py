"""The MLX engine's own parts: folders it reads and refuses, bits, limits, the compiled step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
import mlx.core as mx
from support import assert_same_gradients, find_nonfinite, train_step

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import NonFiniteError, UserError
from crosstune.data.batches.token_batch import split_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.mlx_engine.open import open_session as open_mlx
from crosstune.mlx_engine.quantized import dense_weight
from crosstune.mlx_engine.session import MlxSession
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan


def open_session(model: Path, *, trained: bool = True, **options: Any) -> MlxSession:
    asked = {"backend": "mlx", "precision": "fp32", "model_name": str(model)} | options
    return open_mlx(make_plan(make_config(**asked)), model_folder=model, trained=trained)


def _put_head(folder: Path, *, wanted: bool) -> None:
    """An output head of its own, or none."""
    path = folder / "model.safetensors"
    weights = {name: array for name, array in mx.load(str(path)).items() if name != "lm_head.weight"}
    if wanted:
        weights["lm_head.weight"] = 0.5 * weights["model.embed_tokens.weight"]
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[Any]:
    tokenizer = Tokenizer.from_folder(tiny_model)
    turns = [
        [
            {"role": "user", "content": f"Count to {n}."},
            {"role": "assistant", "content": "1 2 3 4 5 "[: 2 * n]},
        ]
        for n in range(1, 5)
    ]
    examples = [encode_conversation(turn, tokenizer, index=n, whole=False) for n, turn in enumerate(turns)]
    return list(split_rows(examples, batch_size=2, pad_id=0))


@pytest.fixture(scope="module")
def four_bits(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlx") / "four"
    assert (
        main(["convert", str(tiny_model), "--to", "mlx", "--n_bits", "4", "--out", str(out), "--json"]) == 0
    )
    return out


def with_config(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_width_trains_over_what_it_stores(tiny_model: Path, window: list[Any], bits: int) -> None:
    session = open_session(tiny_model, train_type="qlora", n_bits=bits, group_size=32)
    name, adapter = next(iter(session.adapters.items()))
    assert adapter.base.bits == bits
    dense = open_session(tiny_model).adapters[name].base.weight
    error = mx.linalg.norm(dense_weight(adapter.base, mx.float32) - dense) / mx.linalg.norm(dense)
    assert 0 < float(error) < {3: 0.4, 4: 0.2, 8: 0.02}[bits]
    losses = [train_step(session, window, lr=1e-2).loss for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_folder_of_mlx_is_trained_as_it_is(four_bits: Path, window: list[Any], tmp_path: Path) -> None:
    session = open_session(four_bits, train_type="qlora")
    assert (session.plan.quantizer, session.plan.n_bits) == ("mlx", 4)
    train_step(session, window, lr=1e-3)
    record = json.loads((session.save_result(tmp_path) / "crosstune.json").read_text())
    assert record["quantization"]["quantizer"] == "mlx"
    assert open_session(four_bits, trained=False, train_type="full").evaluate(window).loss > 0
    with pytest.raises(UserError, match="differently than requested"):
        open_session(four_bits, train_type="lora")
    with pytest.raises(UserError, match="cannot train"):
        open_session(four_bits, train_type="full")
    with pytest.raises(UserError, match="8 bits"):
        open_session(four_bits, train_type="qlora", n_bits=8)


def test_torch_refuses_a_folder_of_mlx_and_says_where_it_runs(
    four_bits: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", "--backend", "cpu", "--model_name", str(four_bits), "--output_dir", str(tmp_path)]
    for train_type in ("lora", "qlora", "full"):
        assert main([*words, "--train_type", train_type, "--name", train_type, "--max_steps", "1"]) == 2
        error = capsys.readouterr().err
        assert "quantized by MLX" in error
        assert "--backend mlx" in error


def test_folders_that_cannot_be_read_are_named(tiny_model: Path, tmp_path: Path) -> None:
    strange = with_config(tiny_model, tmp_path / "strange", model_type="unheard_of")
    with pytest.raises(UserError, match="unheard_of") as caught:
        open_session(strange)
    assert "torch backend" in caught.value.do
    with pytest.raises(UserError, match="needs to run its own code"):
        open_session(with_config(tiny_model, tmp_path / "code", model_file="model.py"))
    with pytest.raises(UserError, match="needs to run its own code"):
        open_session(with_config(tiny_model, tmp_path / "map", auto_map={"AutoModel": "m.M"}))
    foreign = with_config(tiny_model, tmp_path / "eetq", quantization_config={"quant_method": "eetq"})
    with pytest.raises(UserError, match="quantized by eetq"):
        open_session(foreign)
    with pytest.raises(UserError, match="mlx-lm cannot load"):
        open_session(with_config(tiny_model, tmp_path / "wide", hidden_size=128, head_dim=16))


def test_a_folder_of_another_quantizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("hqq", reason="the hqq extra is not installed")
    out = tmp_path / "hqq"
    assert main(["convert", str(tiny_model), "--to", "hqq", "--out", str(out), "--json"]) == 0
    with pytest.raises(UserError, match="quantized by hqq, which MLX cannot read"):
        open_session(out)


def test_groups_must_divide_the_rows(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "narrow", hidden=96, num_heads=6)
    with pytest.raises(UserError, match="groups of 64"):
        open_session(model, train_type="qlora", group_size=64)
    open_session(model, train_type="qlora", group_size=32)


def test_the_search_names_the_layer_whose_output_went_bad(tiny_model: Path, window: list[Any]) -> None:
    session = open_session(tiny_model)
    layer = session.model.model.layers[1].mlp.down_proj
    layer.base.weight = mx.full(layer.base.weight.shape, mx.inf)
    with pytest.raises(NonFiniteError):
        train_step(session, window, lr=1e-3)
    assert "model.layers.1.mlp.down_proj" in find_nonfinite(session, window)


@pytest.mark.parametrize("bits", [0, 3, 4])
def test_weights_that_are_not_those_of_the_files_are_not_trained(tiny_model: Path, bits: int) -> None:
    """As mlx-lm multiplies, turns or moves those of some models while it reads them."""
    import mlx.nn as nn

    from crosstune.mlx_engine.load import check_stored

    name = "model.layers.1.mlp.down_proj.weight"
    stored = mx.load(str(tiny_model / "model.safetensors"))[name]

    def layer(weight: mx.array) -> Any:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight
        return linear if not bits else nn.QuantizedLinear.from_linear(linear, group_size=32, bits=bits)

    check_stored(tiny_model, {name: layer(stored)}, kind="some")
    if not bits:
        check_stored(tiny_model, {name: stored.astype(mx.bfloat16)}, kind="some")
    for other in (1.4 * stored, stored[::-1], stored.T):
        with pytest.raises(UserError, match="model in this way"):
            check_stored(tiny_model, {name: layer(other)}, kind="some")
    with pytest.raises(UserError, match=r"such as model\.other\.weight"):
        check_stored(tiny_model, {"model.other.weight": stored}, kind="some")


def test_limits_are_set_and_memory_is_counted(tiny_model: Path, tmp_path: Path, window: list[Any]) -> None:
    path = tmp_path / "mlx.json"
    path.write_text(json.dumps({"memory_limit_gb": 3, "cache_limit_gb": 0.25, "num_layers": 1}))
    before = mx.set_memory_limit(2**33), mx.set_cache_limit(2**31)
    session = open_session(tiny_model, mlx_config=str(path), low_memory=True)
    assert mx.set_memory_limit(before[0]) == 3 * 2**30
    assert mx.set_cache_limit(before[1]) == 2**28
    assert all(".layers.1." in name for name in session.adapters)
    assert len(session.adapters) == 7
    train_step(session, window, lr=1e-3)
    assert mx.get_cache_memory() == 0
    assert session.memory().peak_bytes >= session.memory().used_bytes > 0


def feed(session: MlxSession, batch: Any, *, compiled: bool = False) -> dict[str, mx.array]:
    session.task.opening = replace(session.opening, compiled=compiled)
    return {name: mx.array(array) for name, array in session.task.arrays(batch).items()}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_by_parts_give_the_step_of_logits_at_once(
    tiny_model: Path, tmp_path: Path, window: list[Any], method: str, tied: bool
) -> None:
    folder = with_config(tiny_model, tmp_path / "model", tie_word_embeddings=tied)
    _put_head(folder, wanted=not tied)
    found: list[tuple[float, float, dict[str, Any], float]] = []
    for most in (None, 3, 1):
        session = open_session(folder, train_type=method)
        session.loss.places_at_a_time = most
        result = train_step(session, window, lr=1e-3)
        moments = session.export_state().moments["first_moment"]
        found.append((result.loss, result.grad_norm, dict(moments), session.evaluate(window).loss))
    heads = {"model.embed_tokens.weight", "lm_head.weight"} & found[0][2].keys()
    assert len(heads) == {"lora": 0, "full": 1 if tied else 2}[method]
    for loss, norm, moments, after in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert norm == pytest.approx(found[0][1], rel=1e-4)
        assert after == pytest.approx(found[0][3], rel=1e-5)
        assert_same_gradients(moments, found[0][2])


def test_logits_by_parts_take_less_memory(tiny_model: Path, window: list[Any]) -> None:
    """The loss alone, on many more places than the window has."""
    session = open_session(tiny_model)
    arrays = feed(session, window[0])
    many = arrays | {name: mx.tile(arrays[name], 200) for name in ("places", "targets", "counted")}
    gradients = session.gradients
    peaks = []
    for most in (len(many["places"].tolist()), 64):
        session.loss.places_at_a_time = most
        mx.eval(gradients(session.masters.published, many, session.key, scale=1.0))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(gradients(session.masters.published, many, session.key, scale=1.0))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 2, peaks


@pytest.mark.slow
def test_a_compiled_step_is_the_same_step(tiny_model: Path, tmp_path: Path, window: list[Any]) -> None:
    """On a CPU, MLX calls a C++ compiler for a minute."""
    if not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")):
        pytest.skip("MLX compiles steps with a C++ compiler on a CPU, and there is none here")
    path = tmp_path / "mlx.json"
    path.write_text(json.dumps({"compile": True, "num_layers": 1}))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"num_layers": 1}))
    options = {"lora_target_modules": "q_proj,up_proj", "lora_dropout": 0.2}
    compiled = open_session(tiny_model, mlx_config=str(path), **options)
    assert compiled.opening.compiled
    ordinary = open_session(tiny_model, mlx_config=str(plain), **options)
    for _ in range(3):
        expected = train_step(ordinary, window, lr=1e-2)
        assert train_step(compiled, window, lr=1e-2).loss == pytest.approx(expected.loss, rel=1e-5)


def test_mlx_folders_go_there_and_back(
    four_bits: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    plain = tmp_path / "plain"
    words = ["--original", "none", "--out", str(plain), "--json"]
    assert main(["convert", str(four_bits), "--to", "hf", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checked_by"] == "transformers"
    assert report["agreement"]["relative"] < 1e-3
    dense = (
        AutoModelForCausalLM.from_pretrained(plain).state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    )
    held = open_session(four_bits, trained=False, train_type="full").model.model.layers[0].mlp.up_proj
    np.testing.assert_array_equal(dense, np.array(dense_weight(held, mx.float32)))
    assert main(["convert", str(four_bits), "--to", "hqq", "--out", str(tmp_path / "no")]) == 2
    assert "--to hf" in capsys.readouterr().err


def test_adapters_go_there_and_back(
    tiny_model: Path, window: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_session(tiny_model, train_type="dora", lora_rank=5)
    train_step(session, window, lr=1e-2)
    adapter = session.save_result(tmp_path)
    assert main(["convert", str(adapter / "mlx"), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert "the same bits" in capsys.readouterr().out
    name = "adapter_model.safetensors"
    assert (tmp_path / "peft" / name).read_bytes() == (adapter / name).read_bytes()
    assert main(["generate", str(adapter / "mlx"), "--prompt", "hello"]) == 2
    assert "--to peft" in capsys.readouterr().err
    assert main(["convert", str(adapter), "--to", "peft", "--out", str(tmp_path / "no")]) == 2
    assert main(["convert", str(tiny_model), "--to", "peft", "--out", str(tmp_path / "no")]) == 2


def test_too_little_memory_is_told_from_other_errors() -> None:
    from crosstune.core.out_of_memory import OutOfMemory
    from crosstune.mlx_engine.device import memory_errors

    for words in (
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008)",
        "[malloc] Unable to allocate 99999999 bytes.",
        "cudaMallocAsync failed: out of memory",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size",
    ):
        with pytest.raises(OutOfMemory, match="not enough memory"), memory_errors():
            raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="do not fit"), memory_errors():
        raise RuntimeError("[matmul] shapes (2, 3) and (4, 5) do not fit")
