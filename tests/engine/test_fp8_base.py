"""An fp8 base with excluded layers: recorded, and the same after a resume or when the result is opened."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from support import chat, short_batches, train_step

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.core.quantization import BaseChoice, QuantSpec
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.results.chat_model import open_chat_model
from crosstune.runs.move import move
from crosstune.runs.pipeline import train
from crosstune.torch_engine.kernels import choose_layers
from crosstune.torch_engine.loading.load import empty_model, forms_to_quantize
from crosstune.torch_engine.open import open_session

PROMPTS = [[5, 6, 7, 8, 9], [40, 30, 20]]
TOLERANCE = 0.01
"""Some groups of the model leave fp8, and some stay."""


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose predictions depend on every layer."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "sharp")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        weights[name] *= 16 if name == "lm_head.weight" else 4 if "proj" in name else 1
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [chat(f"{a} + {b}?", str(a + b)) for a in range(8) for b in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(sharp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A session after two steps, and the folder of its adapter."""
    session = open_in_fp8(sharp_model)
    for _ in range(2):
        train_step(session, short_batches(sharp_model), lr=1e-2)
    return session, session.save_result(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def finished(sharp_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at two and four."""
    asked = run_options(sharp_model, data, tmp_path_factory.mktemp("finished"))
    return train(make_config(**asked, name="run")).folder


@pytest.fixture
def no_second_choice(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forbid to measure again what leaves fp8, from the call on."""

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("it was chosen before")

    return lambda: monkeypatch.setattr(choose_layers, "choose_fp8_exclusions", measured)


def asked_in_fp8(folder: Path, **more: Any) -> dict[str, Any]:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(folder), "kernels": "fast"}
    return asked | {"base_precision": "fp8", "fp8_tolerance": TOLERANCE} | more


def open_in_fp8(folder: Path, **more: Any) -> Any:
    return open_session(make_plan(make_config(**asked_in_fp8(folder, **more))), model_folder=folder)


def logits_again(target: Path) -> list[np.ndarray]:
    session: Any = open_chat_model(str(target), observer=Observers(), backend="cpu", precision="fp32").session
    return session.logits(PROMPTS)


def distance(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


def run_options(model: Path, data: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    steps = {
        "max_steps": 4,
        "save_steps": 2,
        "keep_last_n": 5,
        "batch_size": 2,
        "skip_eval": True,
        "lr": 1e-2,
    }
    return asked_in_fp8(model, dataset=str(data), output_dir=str(tmp_path / "runs"), **steps) | more


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_jsonl(run / "metrics.jsonl")}


def manifest(run: Path, step: int) -> dict[str, Any]:
    return read_json(run / "checkpoints" / f"step-{step:08d}" / "manifest.json")


def change_manifest(run: Path, copy: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a run, and change the manifest of its checkpoint of step 2."""
    folder = Path(shutil.copytree(run, copy / "run", symlinks=True)) / "checkpoints" / "step-00000002"
    data = read_json(folder / "manifest.json")
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    return folder


def forget_choice(written: dict[str, Any]) -> None:
    """Leave out what older versions did not write."""
    del written["outside_fp8"]
    del written["identity"]["quantization"]["kept"]


def test_a_result_is_opened_over_the_base_that_it_was_trained_over(
    sharp_model: Path, trained: tuple[Any, Path], tmp_path: Path
) -> None:
    session, adapter = trained[0], Path(shutil.copytree(trained[1], tmp_path / "adapter"))
    left = {name for name, stacked in session.task.decoder.groups().items() if not stacked.in_fp8}
    assert 2 < len(left) < 8, "two are never in fp8; some others left, and some did not"
    spec = session.plan.quant_spec
    record = read_json(adapter / "crosstune.json")
    assert record["quantization"] == spec.to_json() and spec.kept
    expected = session.logits(PROMPTS)
    assert distance(logits_again(adapter), expected) < 1e-5
    # An older record has no such key: as before, all layers that the quantizer takes are in fp8.
    del record["quantization"]["kept"]
    (adapter / "crosstune.json").write_text(json.dumps(record))
    before = logits_again(adapter)
    assert distance(before, expected) > 1e-2
    everything = open_in_fp8(sharp_model, fp8_tolerance=0)
    everything.import_weights(session.export_state().weights)
    assert everything.plan.quant_spec.kept == () and everything.plan.base.outside_fp8 == ()
    assert distance(before, everything.logits(PROMPTS)) < 1e-5


def test_the_check_of_a_merge_sees_the_base_that_was_trained(
    trained: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, adapter = trained
    out = tmp_path / "merged"
    words = ["merge", str(adapter), "--into", "dequantized", "--out", str(out), "--dtype", "fp32", "--json"]
    assert main([*words, "--backend", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] and report["against_trained"]["dequantized"]["max_abs"] < 1e-4
    assert report["against_trained"]["original"]["max_abs"] > 1e-2
    assert distance(logits_again(out), session.logits(PROMPTS)) < 1e-4


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_goes_on_with_what_left_fp8_when_it_began(
    method: str, sharp_model: Path, data: Path, tmp_path: Path, no_second_choice: Callable[[], None]
) -> None:
    asked = run_options(sharp_model, data, tmp_path, train_type=method, fp8_tolerance=0.005)
    straight = train(make_config(**asked, name="straight")).folder
    first = manifest(straight, 2)
    assert first["outside_fp8"] and ("kept" in first["identity"]["quantization"]) == (method == "lora")
    plan = read_json(straight / "plan.json")
    assert plan["outside_fp8"] == first["outside_fp8"] and plan["identity"] == first["identity"]
    no_second_choice()
    checkpoint = straight / "checkpoints" / "step-00000002"
    asked |= {"fp8_tolerance": 0.5}  # which would let nothing leave
    resumed = train(make_config(**asked, name="resumed", resume=str(checkpoint))).folder
    assert losses(resumed) == losses(straight) and len(losses(resumed)) == 4
    last = manifest(resumed, 4)
    assert last["outside_fp8"] == first["outside_fp8"] and last["identity"] == first["identity"]
    recorded = read_json(resumed / "adapter" / "crosstune.json")["quantization"]
    assert recorded == first["identity"]["quantization"]
    said = [row.get("message", "") for row in read_jsonl(resumed / "events.jsonl")]
    assert any("stay out of fp8, as chosen when the run began" in message for message in said)


def test_a_moved_run_and_an_exported_checkpoint_have_the_same_base(
    finished: Path, tmp_path: Path, no_second_choice: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished
    expected = logits_again(run)
    no_second_choice()
    out = tmp_path / "exported"
    words = ["checkpoint", "export", str(run), "--out", str(out), "--backend", "cpu"]
    assert main(words) == 0, capsys.readouterr().err
    assert distance(logits_again(out), expected) < 1e-5
    report = move(run, to="cpu", observer=Observers(), out=tmp_path / "moved.tar.gz")
    there = {"resume": report["path"], "output_dir": str(tmp_path / "there"), "max_steps": 5}
    moved = train(make_config(**there, backend="cpu")).folder
    assert losses(moved).keys() == {1, 2, 3, 4, 5}
    assert manifest(moved, 5)["identity"] == manifest(run, 4)["identity"]


def test_a_checkpoint_of_an_older_version_chooses_again(
    sharp_model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    asked, run = run_options(sharp_model, data, tmp_path), finished
    kept = manifest(run, 2)["identity"]["quantization"]["kept"]
    checkpoint = change_manifest(run, tmp_path, forget_choice)
    resumed = train(make_config(**asked, name="resumed", resume=str(checkpoint))).folder
    assert losses(resumed) == losses(run)
    assert manifest(resumed, 4)["identity"]["quantization"]["kept"] == kept


def test_a_base_that_began_with_the_general_layers_keeps_its_weights(
    sharp_model: Path, data: Path, tmp_path: Path
) -> None:
    """The fast layers choose then which products are in fp8, and change no weight."""
    asked = run_options(sharp_model, data, tmp_path)
    run = train(make_config(**asked | {"kernels": "general"}, name="general")).folder
    first = manifest(run, 2)
    assert first["outside_fp8"] is None and "kept" not in first["identity"]["quantization"]
    checkpoint = run / "checkpoints" / "step-00000002"
    asked |= {"fp8_tolerance": 0.001}  # only inputs are rounded now, which costs less
    resumed = train(make_config(**asked, name="fast", resume=str(checkpoint))).folder
    last = manifest(resumed, 4)
    assert last["outside_fp8"] and last["identity"] == first["identity"]
    assert losses(resumed)[3] == pytest.approx(losses(run)[3], rel=1e-2)
    plan = make_plan(make_config(**asked_in_fp8(sharp_model, fp8_tolerance=0.001)))
    plan = replace(plan, base=BaseChoice(quantizer="fp8"))
    opened: Any = open_session(plan, model_folder=sharp_model)
    assert opened.plan.base.outside_fp8 and not opened.plan.base.kept
    general = open_in_fp8(sharp_model, kernels="general")
    assert distance(opened.logits(PROMPTS), general.logits(PROMPTS)) < 1e-6


def test_a_record_of_layers_that_a_model_does_not_have_is_refused(sharp_model: Path) -> None:
    model = empty_model(sharp_model)
    layer = "model.layers.1.self_attn.q_proj"
    spec = QuantSpec(quantizer="fp8", bits=8, group_size=0)
    less = QuantSpec(quantizer="fp8", bits=8, group_size=0, kept=(layer,))
    every = forms_to_quantize(model, spec).keys()
    assert every - forms_to_quantize(model, less).keys() == {f"{layer}.weight"}
    other = QuantSpec(quantizer="fp8", bits=8, group_size=0, kept=(layer, "model.layers.9.mlp.up_proj"))
    with pytest.raises(UserError, match="this model") as caught:
        forms_to_quantize(model, other)
    assert "model.layers.9.mlp.up_proj" in str(caught.value.why)


def test_a_record_of_groups_that_a_model_does_not_have_is_refused(
    sharp_model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    asked = run_options(sharp_model, data, tmp_path)
    checkpoint = change_manifest(
        finished, tmp_path, lambda written: written["outside_fp8"].append("layers.7.qkv")
    )
    with pytest.raises(UserError, match=r"keeps layers\.7\.qkv out of fp8"):
        train(make_config(**asked, name="resumed", resume=str(checkpoint)))


# Rank 1 must not measure, and has the weights and groups of rank 0; whether fp8 products run on it or not.
FOLLOWING = """
import hashlib, json, os
from pathlib import Path
import crosstune.torch_engine.kernels.choose_layers as choose_layers
from crosstune.config.load import make_config
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import open_session
from crosstune.torch_engine.quantized import QuantLinear

asked = json.loads(os.environ["ASKED"])
measure = choose_layers.choose_fp8_exclusions
if group.ranks.rank:
    def measure(*_, **__):
        raise AssertionError("rank 0 chooses")
choose_layers.choose_fp8_exclusions = measure
plan = make_plan(make_config(**asked), ranks=group.ranks)
for refused in (None, "a test refuses it"):
    choose_layers.why_no_fp8 = lambda device, dtype: refused if group.ranks.rank else None
    session = open_session(plan, model_folder=Path(asked["model_name"]), group=group)
    base = session.plan.base
    assert base.kept and base.outside_fp8 and group.all_equal(repr(base))
    stored = {name.replace(".base", "") for name, m in session.model.named_modules() if isinstance(m, QuantLinear)}
    assert not stored & set(base.kept) and group.all_equal(repr(sorted(stored)))
    groups = session.task.decoder.groups()
    outside = {name for name, stacked in groups.items() if not stacked.in_fp8}
    assert set(base.outside_fp8) <= outside and len(outside) == (8 if refused and group.ranks.rank else len(base.outside_fp8) + 2)
    logits = [one.tobytes() for one in session.logits([[5, 6, 7]])]
    assert group.all_equal(hashlib.sha256(b"".join(logits)).hexdigest())
"""


def test_all_processes_take_the_choice_of_the_first(
    sharp_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_in_fp8(sharp_model, world_size=2, sharding_strategy="ddp")
    monkeypatch.setenv("ASKED", json.dumps(asked))
    run_ranks([{"world": 2, "runs": []}], hook=FOLLOWING)
