"""Rows divided among ranks: the numbers of one process, at any division, and what cannot be divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from ranks import run_ranks
from safetensors.torch import load_file
from test_peft_parity import column

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import make_plan
from crosstune.process.ranks import Ranks
from crosstune.runs.pipeline import train

STEPS = 4


def asked_for(model: Path, data: Path, folder: Path, name: str, **options: Any) -> dict[str, Any]:
    common = {
        "model_name": str(model), "dataset": str(data), "output_dir": str(folder), "name": name, "backend": "cpu",
        "precision": "fp32", "kernels": "general", "train_type": "lora", "lr_scheduler": "constant", "lr": 3e-3,
        "wd": 0.05, "grad_norm": 0.5, "max_steps": STEPS, "rows_per_step": 4, "batch_size": 2, "eval_samples": 6,
        "eval_steps": 2, "num_samples": 1, "max_new_tokens": 4, "context_length": 256,
    }  # fmt: skip
    return {**common, **options}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=2)


def evaluations(run: Path) -> list[tuple[float, float]]:
    events = [event for event in read_jsonl(run / "events.jsonl") if event["kind"] == "evaluated"]
    return [(event["loss"], event["metrics"]["exact_match"]) for event in events]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parts", "train_type"), [(2, 2, "full"), (4, 2, "full"), (4, 4, "lora")])
def test_the_numbers_are_those_of_one_process(
    model: Path, data_file: Path, tmp_path: Path, world: int, parts: int, train_type: str
) -> None:
    options = {"train_type": train_type, "use_gradient_checkpointing": train_type == "full", "lr": 1e-3}
    alone = train(make_config(**asked_for(model, data_file, tmp_path, "alone", **options))).folder
    more = options | {"world_size": world, "context_parallel": parts}
    runs = [
        asked_for(model, data_file, tmp_path, strategy, **more, sharding_strategy=strategy)
        for strategy in ("ddp", "full_shard")
    ]
    run_ranks([{"world": world, "runs": runs}])
    result = {"lora": "adapter/adapter_model.safetensors", "full": "model/model.safetensors"}[train_type]
    expected = load_file(alone / result)
    for strategy in ("ddp", "full_shard"):
        run = tmp_path / strategy
        for name in ("loss", "grad_norm"):
            assert column(run, name) == pytest.approx(column(alone, name), rel=1e-5)
        assert column(run, "supervised_tokens") == column(alone, "supervised_tokens")
        for found, wanted in zip(evaluations(run), evaluations(alone), strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
        for name, tensor in load_file(run / result).items():
            assert np.abs((tensor - expected[name]).numpy()).mean() < 1e-5, name


@pytest.mark.slow
def test_a_run_continues_with_another_division(model: Path, data_file: Path, tmp_path: Path) -> None:
    straight = train(make_config(**asked_for(model, data_file, tmp_path, "straight"))).folder
    first = asked_for(
        model, data_file, tmp_path, "moved", world_size=2, context_parallel=2, save_steps=2, rows_per_step=0,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    run_ranks([{"world": 2, "runs": [first | {"max_steps": 2}]}])
    assert read_json(tmp_path / "moved" / "plan.json")["options"]["context_parallel"] == 2
    named = {name: first[name] for name in ("output_dir", "name")}
    train(make_config(**named, resume=str(tmp_path / "moved"), max_steps=STEPS, world_size=1))
    assert column(tmp_path / "moved", "loss") == pytest.approx(column(straight, "loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": True}, "packed rows have several"),
        ({"kernels": "fast"}, "the fast layers attend to whole rows"),
        ({"context_parallel": 3}, r"(?s)cannot be divided into groups of 3.*--context_parallel (2|4)"),
        ({"recipe": "preference"}, "the preference recipe compares whole answers"),
        ({"lora_dropout": 0.1}, "dropout would depend"),
        ({"backend": "mlx"}, "MLX replicates the model"),
        ({"batch_size": "auto"}, "the search for the largest batch"),
    ],
)
def test_runs_that_cannot_divide_their_rows(
    model: Path, data_file: Path, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    asked = asked_for(
        model, data_file, tmp_path, "run", **{"world_size": 4, "context_parallel": 2, **options}
    )
    ranks = Ranks(engine="mlx" if "backend" in options else "torch", size=4, local_size=4)
    with pytest.raises(UserError, match=why):
        make_plan(make_config(**asked), ranks=ranks)


def test_models_that_cannot_divide_their_rows(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    small = tiny_model(tmp_path / "tiny", num_layers=1)
    for name, config in {
        "window": hf.MistralConfig(**shape, sliding_window=8),
        "dynamic": hf.LlamaConfig(**shape, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "learned positions": hf.GPT2Config(vocab_size=512, n_embd=32, n_layer=1, n_head=2),
    }.items():
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        hf.AutoTokenizer.from_pretrained(small).save_pretrained(tmp_path / name)
    cases = {"window": "a sliding window", "dynamic": "depend on the length of the row"}
    hook = f"""
import json
from pathlib import Path
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import open_session
found = {{}}
for name in ["window", "dynamic", "learned positions"]:
    folder = Path({str(tmp_path)!r}, name)
    options = dict(backend="cpu", world_size=2, context_parallel=2, kernels="general", precision="fp32", train_type="full")
    plan = make_plan(make_config(model_name=str(folder), **options), ranks=group.ranks)
    try:
        open_session(plan, model_folder=folder, group=group)
        found[name] = "opened"
    except UserError as error:
        found[name] = error.why
if group.ranks.first:
    Path({str(tmp_path)!r}, "found.json").write_text(json.dumps(found))
"""
    run_ranks([{"world": 2, "runs": []}], hook=hook)
    found = json.loads((tmp_path / "found.json").read_text())
    for name, why in cases.items():
        assert why in found[name]
    assert found["learned positions"] == "opened", "any model whose attention takes the part of a row"


@pytest.mark.slow
def test_the_plan_knows_the_memory_of_a_part(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", hidden=128, intermediate=384, num_layers=4)
    hook = f"""
import json
from pathlib import Path
import numpy as np
from crosstune.config.load import make_config
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.rehearse import CountStep, count_first_step
from crosstune.torch_engine.open import open_session

found, folder = [], Path({str(folder)!r})
common = dict(model_name=str(folder), backend="cpu", world_size=4, train_type="full", precision="fp32", kernels="general")
row = Example(tokens=np.arange(1024, dtype=np.int32) % 500, supervised=np.ones(1024, np.bool_), index=0)
for recomputes in (False, True):
    for parts in (2, 4):
        options = dict(context_parallel=parts, use_gradient_checkpointing=recomputes, batch_size=1, context_length=1024)
        plan = make_plan(make_config(**common, **options), ranks=group.ranks)
        session = open_session(plan, model_folder=folder, group=group)
        window = [session.prepare(pad_rows([row], pad_id=0)) for _ in range(4 // parts)]
        counted = count_first_step(session, lambda: session.backward(window), CountStep(num_local=4))
        found.append([counted.peak, plan.fitted.parts.total - plan.fitted.parts.overhead])
        session.parallel.mesh = None
        del session
if group.ranks.first:
    Path({str(tmp_path)!r}, "found.json").write_text(json.dumps(found))
"""
    run_ranks([{"world": 4, "runs": []}], hook=hook)
    found = json.loads((tmp_path / "found.json").read_text())
    for counted, planned in found:
        assert planned == pytest.approx(counted, rel=0.1)
    assert found[1][0] < found[0][0] and found[3][0] < found[2][0]
