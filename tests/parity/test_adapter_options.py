"""Options of adapters against PEFT itself: the losses of a plain PEFT loop, and the saved adapter opened by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_runs import (
    COMMON,
    ORDER,
    TOKENS,
    check_result,
    check_resume,
    loss_in_peft,
    peft_losses,
    run_everywhere,
    run_options,
)
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.loftq_utils import _low_rank_decomposition
from test_peft_parity import column, reference_model, reference_run
from transformers import AutoModelForCausalLM

from crosstune.api.model import load
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.weights import orthogonal_by_name
from crosstune.files.json_files import read_json
from crosstune.runs.pipeline import train


def test_layers_to_transform_is_that_of_peft(
    models: dict[bool, Path], data_file: Path, tmp_path: Path
) -> None:
    model = models[False]
    asked = run_options(model, data_file, tmp_path, layers_to_transform="0,2-2")
    run = train(make_config(**asked)).folder
    *expected, after = peft_losses(model, layers_to_transform=[0, 2])
    assert column(run, "loss") == pytest.approx(expected, rel=1e-5)
    assert read_json(run / "adapter" / "adapter_config.json")["layers_to_transform"] == [0, 2]
    check_result(run, model, after=after)
    check_resume(tmp_path / "resumed", asked, run, backend="cpu")


@pytest.mark.slow
def test_layers_to_transform_on_mlx_and_on_the_fast_layers(
    models: dict[bool, Path], data_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm")
    asked, run = run_everywhere(models[False], data_file, tmp_path, layers_to_transform="0,2")
    check_result(run, models[False])
    check_resume(tmp_path / "resumed", asked, run, backend="mlx")
    moved = tmp_path / "moved.tar"
    assert main(["move", str(tmp_path / "resumed" / "run"), "--to", "cpu", "--out", str(moved)]) == 0


@pytest.mark.parametrize("value", ["", "a", "3-1", "-1", "0,,1", "1.5", "0-99999"])
def test_wrong_layers_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="layers_to_transform"):
        make_config(layers_to_transform=value)


def test_a_layer_that_the_model_lacks_is_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend in ("cpu", "mlx"):
        asked = run_options(models[False], data_file, tmp_path, layers_to_transform="1-3", backend=backend)
        with pytest.raises(UserError, match=r"(?s)layers_to_transform 3 matches no layer.*0 to 2"):
            train(make_config(**asked))
    assert not (tmp_path / "run").exists()
    words = [f"--{name}={value}" for name, value in (asked | {"layers_to_transform": "1"}).items()]
    settings = tmp_path / "mlx.json"
    settings.write_text('{"num_layers": 1}')
    assert main(["train", *words, "--mlx_config", str(settings)]) == 2
    assert "layers_to_transform and num_layers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "tied", "settings"),
    [
        (
            "embed_tokens,lm_head,model.norm,input_layernorm",
            False,
            {"modules_to_save": ["embed_tokens", "input_layernorm", "lm_head", "model.norm"]},
        ),
        ("lm_head", True, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    ],
)
def test_modules_to_save_is_that_of_peft(
    models: dict[bool, Path],
    data_file: Path,
    tmp_path: Path,
    listed: str,
    tied: bool,
    settings: dict[str, Any],
) -> None:
    model = models[tied]
    asked = run_options(model, data_file, tmp_path, modules_to_save=listed)
    run = train(make_config(**asked)).folder
    *expected, after = peft_losses(model, **copy.deepcopy(settings))
    assert column(run, "loss") == pytest.approx(expected, rel=1e-5)
    written = read_json(run / "adapter" / "adapter_config.json")
    assert {name: written.get(name) for name in settings} == settings
    check_result(run, model, after=after)
    check_resume(tmp_path / "resumed", asked, run, backend="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("listed", "tied"), [("embed_tokens,lm_head", False), ("embed_tokens,norm", True)])
def test_modules_to_save_on_mlx_and_elsewhere(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, listed: str, tied: bool
) -> None:
    pytest.importorskip("mlx_lm")
    losses = {}
    for name in ("cpu", "mlx"):
        asked = run_options(models[tied], data_file, tmp_path / name, modules_to_save=listed, backend=name)
        run = train(make_config(**asked)).folder
        losses[name] = column(run, "loss")
    assert losses["mlx"] == pytest.approx(losses["cpu"], rel=1e-5)
    check_result(run, models[tied])
    check_mlx(run)
    check_resume(tmp_path / "resumed", asked, run, backend="mlx")
    moved = tmp_path / "moved.tar"
    assert main(["move", str(tmp_path / "resumed" / "run"), "--to", "cpu", "--out", str(moved)]) == 0
    again = asked | {"backend": "cpu", "base_adapter": str(run / "adapter"), "name": "again", "max_steps": 1}
    continued = train(make_config(**again)).folder
    assert column(continued, "loss", learns=False)[0] < losses["cpu"][0] - 0.05


def check_mlx(run: Path) -> None:
    """A merge on MLX has the logits of the run; mlx-lm's adapters cannot have whole modules."""
    assert not (run / "adapter" / "mlx").exists()
    ours = load(run, backend="cpu", progress=False).logits(TOKENS)
    merged = load(run, backend="mlx", progress=False).merge(run.parent / "merged-mlx")
    assert load(merged, backend="cpu", progress=False).logits(TOKENS) == pytest.approx(ours, abs=1e-4)


@pytest.mark.slow
def test_a_quantized_base_has_dense_modules_to_save(
    models: dict[bool, Path], data_file: Path, tmp_path: Path
) -> None:
    for precision in ("bf16", "bf16_autocast"):
        options = {
            "train_type": "qlora",
            "precision": precision,
            "modules_to_save": "embed_tokens,lm_head,norm",
        }
        asked = run_options(models[False], data_file, tmp_path / precision, **options)
        run = train(make_config(**asked)).folder
        column(run, "loss")
        check_resume(tmp_path / precision / "resumed", asked, run, backend="cpu")
        ours = load(run, backend="cpu", progress=False)
        merged = load(ours.merge(run.parent / "merged", into="dequantized"), backend="cpu", progress=False)
        assert merged.logits(TOKENS) == pytest.approx(ours.logits(TOKENS), abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": "embd"}, "modules_to_save embd matches no module.*embed_tokens.*lm_head"),
        ({"modules_to_save": "mlp"}, "modules_to_save mlp includes .*mlp.*, which has an adapter"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    for backend in ("cpu", "mlx"):
        with pytest.raises(UserError, match=f"(?s){message}"):
            train(make_config(**run_options(models[False], data_file, tmp_path, **options, backend=backend)))
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_untied_its_head_is_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(models[True])
    config = LoraConfig(
        r=8, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    opened = load(tmp_path / "adapter", backend="cpu", progress=False)
    for use in (lambda: opened.logits(TOKENS), lambda: opened.merge(tmp_path / "merged")):
        with pytest.raises(UserError, match="apart from the output head"):
            use()


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "train_type": "dora"}])
def test_pissa_is_that_of_peft(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The result is an adapter of twice the rank on the unchanged base."""
    settings = {"use_rslora": "use_rslora" in options, "use_dora": "train_type" in options}
    asked = run_options(models[False], data_file, tmp_path, init_lora="pissa", **options)
    run = train(make_config(**asked)).folder
    *expected, after = peft_losses(models[False], init_lora_weights="pissa", **settings)
    assert column(run, "loss") == pytest.approx(expected, rel=1e-5)
    assert read_json(run / "adapter" / "adapter_config.json")["r"] == 16
    check_result(run, models[False], after=after, bound=2e-5)
    if not options:
        check_resume(tmp_path / "resumed", asked, run, backend="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"train_type": "bnb_dora"}, {"lora_alpha": 32}])
def test_loftq_is_that_of_peft(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """PEFT ignores the scale of the adapter, which is 1 there."""
    train_type, alpha = options.get("train_type", "qlora"), options.get("lora_alpha", 8)
    fixed = {"train_type": "qlora", "lora_alpha": 8, "quantization_backend": "bnb", "init_lora": "loftq"}
    asked = run_options(models[False], data_file, tmp_path, **fixed | options)
    run = train(make_config(**asked)).folder
    weights = AutoModelForCausalLM.from_pretrained(models[False], dtype=torch.float32).state_dict()

    def make(folder: Path, _: str, seed: int, *, dtype: torch.dtype) -> Any:
        model = reference_model(folder, train_type, seed, dtype=dtype)
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                layer.scaling["default"] = 1.0
                stored = layer.get_base_layer().weight
                dense = dequantize_4bit(stored.data, stored.quant_state)
                weight = weights[f"{name.removeprefix('base_model.model.')}.weight"]
                start = _low_rank_decomposition(weight - dense, reduced_rank=8)
                layer.lora_A["default"].weight.data = start["R"]
                layer.lora_B["default"].weight.data = start["L"]
                if train_type == "bnb_dora":
                    layer.lora_magnitude_vector["default"].weight.data = (
                        (dense + start["L"] @ start["R"]).norm(dim=1).contiguous()
                    )
        return model

    expected = reference_run(models[False], COMMON, ORDER, make=make).losses
    ours = column(run, "loss")
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    if alpha == 8:
        assert ours == pytest.approx(expected[:-1], rel=1e-5)
    plain = asked | {"init_lora": "default", "name": "plain", "max_steps": 1}
    dense = plain | {"train_type": "lora", "quantization_backend": "none", "name": "dense"}
    starts = [column(train(make_config(**o)).folder, "loss", learns=False)[0] for o in (plain, dense)]
    assert abs(ours[0] - starts[1]) < abs(starts[0] - starts[1]), "closer to the unquantized model"
    opened = load(run, backend="cpu", progress=False)
    merged = load(opened.merge(run.parent / "merged", into="dequantized"), backend="cpu", progress=False)
    assert merged.logits(TOKENS) == pytest.approx(opened.logits(TOKENS), abs=1e-4)
    if not options:
        check_resume(tmp_path / "resumed", asked, run, backend="cpu")


def test_orthogonal_factors_are_those_of_peft(
    models: dict[bool, Path], data_file: Path, tmp_path: Path
) -> None:
    a, b = orthogonal_by_name("layer", shape=(400, 300), rank=8, seed=1)
    assert np.abs(b @ a).max() < 1e-5, "the model starts as the base"
    layer = torch.nn.Sequential(torch.nn.Linear(300, 400))
    torch.manual_seed(0)
    theirs = get_peft_model(layer, LoraConfig(r=8, target_modules=["0"], init_lora_weights="orthogonal"))
    for ours, other in ((a, "lora_A"), (b, "lora_B")):
        [weight] = [p.detach().numpy() for name, p in theirs.named_parameters() if other in name]
        assert ours.shape == weight.shape
        np.testing.assert_allclose(ours.std(), weight.std(), rtol=0.1)
    asked = run_options(models[False], data_file, tmp_path, init_lora="orthogonal")
    run = train(make_config(**asked)).folder
    plain = train(make_config(**asked | {"name": "plain", "init_lora": "default"})).folder
    starts = [column(folder, "loss")[0] for folder in (run, plain)]
    assert starts[0] == pytest.approx(starts[1], rel=1e-5)
    check_result(run, models[False])
    check_resume(tmp_path / "resumed", asked, run, backend="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["pissa", "orthogonal"])
def test_starts_on_mlx_and_on_the_fast_layers(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, start: str
) -> None:
    pytest.importorskip("mlx_lm")
    asked, run = run_everywhere(models[False], data_file, tmp_path, init_lora=start)
    after = loss_in_peft(models[False], tmp_path / "plain" / "run" / "adapter")
    check_result(run, models[False], after=after, bound=2e-5)
    check_resume(tmp_path / "resumed", asked, run, backend="mlx")
    moved = tmp_path / "moved.tar"
    assert main(["move", str(tmp_path / "resumed" / "run"), "--to", "cpu", "--out", str(moved)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora": "pissa", "train_type": "qlora"}, "pissa does not work on a quantized base"),
        ({"init_lora": "loftq"}, "loftq needs a quantized base"),
        ({"init_lora": "loftq", "train_type": "qlora", "backend": "mlx"}, "loftq does not work on MLX"),
        (
            {"init_lora": "loftq", "train_type": "qlora", "lora_rank": 300},
            "loftq needs a --lora_rank of at most",
        ),
        ({"init_lora": "pissa", "lora_rank": 300}, "lora_rank of at most"),
        ({"init_lora": "orthogonal", "lora_rank": 7}, "an even --lora_rank"),
        ({"init_lora": "pissa", "base_adapter": "somewhere"}, "cannot be combined with --base_adapter"),
    ],
)
def test_starts_that_cannot_work_are_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(make_config(**run_options(models[False], data_file, tmp_path, **options)))
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize(
    "changed", [{"init_lora": "pissa"}, {"layers_to_transform": "1"}, {"modules_to_save": "lm_head"}]
)
def test_a_resume_with_other_adapters_is_refused(
    models: dict[bool, Path], data_file: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    asked = run_options(models[False], data_file, tmp_path, max_steps=1, save_steps=1)
    run = train(make_config(**asked)).folder
    with pytest.raises(UserError, match=next(iter(changed))):
        train(make_config(**asked | changed | {"resume": str(run), "max_steps": 2}))
