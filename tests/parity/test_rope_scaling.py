"""Longer rows by scaled rotary positions: transformers with the same config, every path of a run, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from adapter_runs import ALL_LINEAR, COMMON, TOKENS, check_resume, peft_logits, run_options
from peft import LoraConfig, get_peft_model
from test_peft_parity import column, order_of_rows, reference_run, start_adapter

from crosstune.api.model import load
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import LENGTH_STEP
from crosstune.models.folder import read_config_json
from crosstune.models.gguf_families import read_family, read_metadata
from crosstune.models.locate import locate
from crosstune.models.rope_scaling import scale_rope
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import make_plan
from crosstune.runs.pipeline import train

KINDS = ("linear", "dynamic", "yarn", "llama3")
TRAINED, FACTOR, NUM_STEPS = 32, 4.0, 3
ALONE = COMMON | {"batch_size": 1}
"""One row at a time: `dynamic` depends on the rows before."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def short_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models trained for rows of 32 tokens, whose weights are large enough for positions to matter."""
    home = tmp_path_factory.mktemp("short")
    llama, qwen = tiny_model(home / "llama", num_layers=2, max_context=TRAINED), home / "qwen"
    shape = json.loads((llama / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "max_position_embeddings", "pad_token_id", "eos_token_id", "bos_token_id")
    torch.manual_seed(0)
    config = hf.Qwen2Config(**{name: shape[name] for name in kept}, initializer_range=0.2)
    hf.Qwen2ForCausalLM(config).save_pretrained(qwen)
    hf.AutoTokenizer.from_pretrained(llama).save_pretrained(qwen)
    return {"llama": llama, "qwen": qwen}


def scaled_by_hand(folder: Path, target: Path, kind: str) -> Path:
    """A copy of the model, scaled as the documentation of transformers says."""
    shutil.copytree(folder, target)
    config = hf.AutoConfig.from_pretrained(folder)
    rope = {"rope_type": kind, "factor": FACTOR, "rope_theta": 10000.0}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = TRAINED
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters = rope
    if kind != "dynamic":
        config.max_position_embeddings = int(TRAINED * FACTOR)
    config.save_pretrained(target)
    return target


class SinglyPadded(torch.nn.Module):
    """Rows padded as in a run, each with the frequencies of its own length: transformers keeps those of the longest so far."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        [self.rotary] = [each for each in model.modules() if type(each).__name__.endswith("RotaryEmbedding")]

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.rotary.__init__(self.rotary.config)
        missing = -input_ids.shape[1] % LENGTH_STEP
        found = self.model(input_ids=torch.nn.functional.pad(input_ids, (0, missing)))
        found.logits = found.logits[:, : input_ids.shape[1]]
        return found


def expected_losses(folder: Path) -> list[float]:
    def make(path: Path, train_type: str, seed: int, *, dtype: torch.dtype) -> Any:
        base = hf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")
        model = get_peft_model(base, settings)
        start_adapter(model, seed=seed)
        if "dynamic" in str(base.config.rope_parameters):
            model = SinglyPadded(model)
        return model

    return reference_run(folder, ALONE, order_of_rows(ALONE, NUM_STEPS), make=make).losses


def asked_for(model: Path, data: Path, folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    scaling = {"rope_scaling": kind, "rope_factor": FACTOR, "context_length": 128, "max_steps": NUM_STEPS}
    return run_options(model, data, folder, **{**scaling, "batch_size": 1, **options})


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "yarn"),
        *(pytest.param("llama", kind, marks=pytest.mark.slow) for kind in ("linear", "dynamic")),
        pytest.param("qwen", "llama3", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_transformers_with_the_same_config(
    short_models: dict[str, Path], data_file: Path, tmp_path: Path, family: str, kind: str
) -> None:
    model = short_models[family]
    expected = expected_losses(scaled_by_hand(model, tmp_path / "scaled", kind))
    assert expected_losses(model) != pytest.approx(expected, rel=1e-5), "the scaling does nothing here"
    for kernels in ("general", "fast"):
        asked = asked_for(model, data_file, tmp_path / kernels, kind, kernels=kernels)
        assert column(train(make_config(**asked)).folder, "loss") == pytest.approx(expected, rel=1e-5)
    asked = asked_for(model, data_file, tmp_path / "mlx", kind, backend="mlx")
    assert column(train(make_config(**asked)).folder, "loss") == pytest.approx(expected, rel=1e-5)


def test_every_form_of_the_result_is_scaled(
    short_models: dict[str, Path], data_file: Path, tmp_path: Path
) -> None:
    model = short_models["llama"]
    by_hand = scaled_by_hand(model, tmp_path / "scaled", "yarn")
    asked = asked_for(model, data_file, tmp_path, "yarn")
    run = train(make_config(**asked)).folder
    opened = load(run, backend="cpu", progress=False)
    ours = opened.logits(TOKENS)
    assert peft_logits(by_hand, run / "adapter") == pytest.approx(ours, abs=1e-5)
    assert peft_logits(model, run / "adapter") != pytest.approx(ours, abs=1e-3)
    base = json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == model, "the adapter names the model itself, not a folder of the cache"
    for target in (run / "adapter", Path(opened.merge(tmp_path / "merged"))):
        assert load(target, backend="cpu", progress=False).logits(TOKENS) == pytest.approx(ours, abs=1e-5)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["max_position_embeddings"] == TRAINED * FACTOR
    for name in ("rope_parameters", "rope_scaling"):
        assert (config[name]["rope_type"], config[name]["factor"]) == ("yarn", FACTOR)
    whole = asked_for(model, data_file, tmp_path, "yarn", train_type="full", name="full", lr=1e-4)
    config = json.loads((train(make_config(**whole)).folder / "model" / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling"):
        assert (config[name]["rope_type"], config[name]["factor"]) == ("yarn", FACTOR)


def test_a_run_resumes_with_its_own_scaling_only(
    short_models: dict[str, Path], data_file: Path, tmp_path: Path
) -> None:
    asked = asked_for(short_models["llama"], data_file, tmp_path, "linear", max_steps=10)
    check_resume(tmp_path / "again", asked, train(make_config(**asked)).folder, backend="cpu")
    there = asked | {"output_dir": str(tmp_path / "again"), "resume": "auto", "max_steps": 12}
    with pytest.raises(UserError, match=r"rope_factor: 4\.0 in the checkpoint, 8\.0 now"):
        train(make_config(**there | {"rope_factor": 8.0}))
    with pytest.raises(UserError, match=r"rope_scaling: linear in the checkpoint, yarn now"):
        train(make_config(**there | {"rope_scaling": "yarn"}))


@pytest.mark.parametrize(
    ("changed", "options", "why"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {}, r"already scaled \(yarn by 2\)"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": None}, {}, "already scaled"),
        ({"max_position_embeddings": None}, {}, "lacks max_position_embeddings"),
        ({"rope_parameters": None, "rope_theta": ...}, {}, "no rotary positions"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
            {},
            r"different kinds \(full_attention, sliding_attention\)",
        ),
        ({}, {"rope_factor": 1.0}, "needs a --rope_factor above 1"),
        ({}, {"rope_factor": None}, "needs a --rope_factor above 1"),
        ({}, {"rope_factor": 0.5}, "rope_factor"),
    ],
)
def test_contradictions_are_refused_by_name(
    short_models: dict[str, Path],
    data_file: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    options: dict[str, Any],
    why: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(short_models["llama"], folder)
    config = json.loads((folder / "config.json").read_text()) | changed
    config = {name: value for name, value in config.items() if value not in (None, ...)}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=why):
        train(make_config(**asked_for(folder, data_file, tmp_path, "llama3", **options)))


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_files_are_scaled_or_refused(short_models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    model = scale_rope(locate(str(short_models["llama"])), kind, FACTOR)
    config = read_config_json(model.path)
    if kind == "dynamic":
        with pytest.raises(UserError, match="RoPE is scaled"):
            read_family(model.path, config)
        return
    metadata = read_metadata(*read_family(model.path, config))
    if kind != "llama3":  # which has a tensor of factors
        assert metadata["rope.scaling.type"] == kind
        assert metadata["rope.scaling.factor"] == FACTOR


def test_the_context_of_a_plan_grows_with_the_factor(short_models: dict[str, Path]) -> None:
    for kind, factor, context in (("none", None, 32), ("yarn", 4.0, 128), ("dynamic", 16.0, 500)):
        plan = make_plan(
            make_config(
                model_name=str(short_models["llama"]),
                backend="cpu",
                context_length=500,
                rope_scaling=kind,
                rope_factor=factor,
            )
        )
        assert plan.config.context_length == context
        said = [each.reason for each in plan.adjustments if each.option == "rope_scaling"]
        assert ["PEFT" in each for each in said] == [True] * (kind != "none"), "an adapter cannot contain it"
