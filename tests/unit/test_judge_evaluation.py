"""The judge's evaluation: unreadable verdicts, undefined metrics, baselines, predictions, presets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest

from crosstune.cli.judge_lines import metric_lines as table_lines
from crosstune.config.load import load_config, make_config
from crosstune.core.errors import UserError
from crosstune.data.batches.row_order import rows_per_step
from crosstune.estimate.machine import BackendReport, Device
from crosstune.files.json_files import to_json
from crosstune.recipes.judge.evaluation import (
    FEW_GROUPS,
    baseline_verdicts,
    defined_metrics,
    evaluate_items,
    worst_items,
)
from crosstune.recipes.judge.items import Item, Scale
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.predictions import read_predictions, write_predictions
from crosstune.recipes.judge.presets import choose_preset
from crosstune.recipes.judge.verdicts import JudgeSettings, read_judge_settings
from crosstune.report.judge_section import TITLES

TEN = Scale(low=0, high=10)


def scored(*scores: float) -> list[Item]:
    return [
        Item(id=f"i{n}", group=f"g{n}", task=f"t{n}", answers=("x" * (n + 1),), score=score)
        for n, score in enumerate(scores)
    ]


def compared(*winners: str) -> list[Item]:
    return [
        Item(id=f"i{n}", group=f"g{n}", task=f"t{n}", answers=("x" * 3, "y" * (2 + n)), winner=winner)
        for n, winner in enumerate(winners)
    ]


def test_an_unreadable_score_is_the_worst_one_and_counted() -> None:
    items = scored(2.0, 9.0)
    report = evaluate_items(items, [Judgement(), Judgement(score=9.0)], scale=TEN, intervals=False)
    assert report["num_unreadable"] == 1
    assert report["metrics"]["mae"] == pytest.approx((8.0 + 0.0) / 2)
    assert report["metrics"]["within_1"] == 0.5
    assert report["confusion"]["counts"][2][-1] == 1 and report["confusion"]["labels"][-1] == "unreadable"


@pytest.mark.parametrize("scale", [Scale(low=1, high=3), Scale(low=0, high=1), TEN])
def test_an_unreadable_score_is_wrong_in_every_metric(scale: Scale) -> None:
    """Even if no score of the scale is more than a point off."""
    items = [
        replace(one, critique="one error")
        for one in scored(scale.low, (scale.low + scale.high) / 2, scale.high)
    ]
    right = [Judgement(score=one.score, text="t", feedback="one error") for one in items]
    perfect = evaluate_items(items, right, scale=scale, intervals=False)
    for place in range(3):
        for unread in (Judgement(), Judgement(text="no verdict")):
            found = [unread if n == place else one for n, one in enumerate(right)]
            report = evaluate_items(items, found, scale=scale, intervals=False)
            assert report["metrics"]["within_1"] == pytest.approx(2 / 3)
            for name, best in perfect["metrics"].items():
                value = report["metrics"][name]
                assert value > best if name in ("mae", "rmse") else value < best, name


def test_an_unreadable_winner_is_wrong_and_counted() -> None:
    items = compared("A", "B", "tie")
    found = [
        Judgement(winner="A", consistent=True),
        Judgement(consistent=False),
        Judgement(winner="tie", consistent=True),
    ]
    report = evaluate_items(items, found, scale=TEN, intervals=False)
    assert report["num_unreadable"] == 1
    assert report["metrics"]["accuracy"] == pytest.approx(2 / 3)
    assert report["metrics"]["swap_consistency"] == pytest.approx(2 / 3)
    assert report["metrics"]["macro_f1"] < 0.67


def test_a_test_set_of_one_class_has_no_correlation_and_says_so() -> None:
    report = evaluate_items(scored(5, 5, 5), [Judgement(score=s) for s in (4.0, 5.0, 6.0)], scale=TEN)
    assert math.isnan(report["metrics"]["pearson"]) and "pearson" not in report["intervals"]
    assert "every item has the same label, 5" in report["notes"][0] and "pearson" in report["notes"][0]
    assert "pearson" not in defined_metrics(report) and "mae" in defined_metrics(report)
    assert any("undefined" in line for line in table_lines(report))
    pairs = evaluate_items(compared("A", "A"), [Judgement(winner="A", consistent=True)] * 2, scale=TEN)
    assert math.isnan(pairs["metrics"]["kappa"]) and "same label, A" in pairs["notes"][0]


def test_baselines_are_fitted_on_the_training_items() -> None:
    train = scored(0, 1, 2, 3)  # longer answers are better there
    items, pairs = scored(4, 8), compared("B", "A", "B")
    found = baseline_verdicts(items, scale=TEN, train=train)
    assert [one.score for one in found["constant"]] == [1.5, 1.5]
    assert [one.score for one in found["longer answer"]] == pytest.approx([0.0, 1.0])
    beside = evaluate_items(pairs, [Judgement()] * 3, scale=TEN, others=baseline_verdicts(pairs, scale=TEN))
    assert beside["baselines"]["constant"]["metrics"]["accuracy"] == pytest.approx(2 / 3)
    assert beside["baselines"]["longer answer"]["metrics"]["accuracy"] == pytest.approx(1 / 3)
    shorter = baseline_verdicts(pairs, scale=TEN, train=compared("B", "A", "A"))["shorter answer"]
    assert [one.winner for one in shorter] == ["B", "tie", "A"]
    assert beside["metrics"]["accuracy"] == 0 and beside["num_unreadable"] == 3
    of_swaps = [note for note in beside["baselines"]["constant"]["notes"] if "swap_consistency" in note]
    assert of_swaps == ["swap_consistency undefined: pairs were not judged in both orders"]


def test_rewards_have_a_mean_margin_and_a_length_bias_is_reported() -> None:
    """The labels prefer the longer answer in 40 % of the pairs, the judge always."""
    pairs = [
        Item(id=f"i{n}", group=f"g{n}", task="t", answers=("xxx", "y"), winner="A" if n < 16 else "B")
        for n in range(40)
    ]
    found = [Judgement(winner="A", rewards=(1.5, 0.5))] * 40
    report = evaluate_items(pairs, found, scale=TEN)
    assert report["metrics"]["margin"] == pytest.approx(0.4 - 0.6) and "margin" in report["intervals"]
    assert report["metrics"]["accuracy"] == 0.4 and "swap_consistency" not in report["metrics"]
    [said] = [note for note in report["notes"] if "length" in note]
    assert "the longer answer in 100% of the pairs, the labels in 40%" in said and "0% right where" in said
    fair = [Judgement(winner=one.winner, rewards=(1.0, 0.0)) for one in pairs]
    assert not any("length" in note for note in evaluate_items(pairs, fair, scale=TEN)["notes"])


def test_calibration_and_feedback_are_measured() -> None:
    items = [replace(one, critique="two wrong words") for one in scored(5, 5)]
    found = [
        Judgement(score=5.0, confidence=0.9, text="t", feedback="two words"),
        Judgement(score=1.0, confidence=0.9, text="t", feedback=""),
    ]
    metrics = evaluate_items(items, found, scale=TEN, intervals=False)["metrics"]
    assert set(metrics) <= set(TITLES), "the page and the table show every metric"
    assert metrics["ece"] == pytest.approx(0.4) and metrics["rouge_l"] == pytest.approx((2 * 2 / 5) / 2)


def test_worst_disagreements_come_first() -> None:
    items = scored(0, 5, 9, 3)
    found = [Judgement(score=1.0), Judgement(score=5.0), Judgement(score=2.0), Judgement()]
    assert worst_items(items, found) == [3, 2, 0]


@pytest.mark.parametrize("pairs", [False, True])
def test_predictions_read_back_with_the_same_metrics(tmp_path: Path, pairs: bool) -> None:
    """Those of the baselines too, fitted on items that the file does not have."""
    draw = np.random.default_rng(0)
    if pairs:
        items, train = compared("A", "B", "tie", "A"), compared("B", "B")
        both = zip("ABBA", (True, False) * 2, strict=True)
        found = [Judgement(winner=w, consistent=c, confidence=0.7) for w, c in both]
    else:
        items, train = scored(*draw.uniform(0, 10, 20)), scored(1, 2, 9)
        found = [Judgement(score=float(s), confidence=0.5) for s in draw.uniform(0, 10, 19)]
        found.append(Judgement(text="?"))
    others = baseline_verdicts(items, scale=TEN, train=train) | {"untrained model": found[::-1]}
    write_predictions(tmp_path / "p.json", items, found, scale=TEN, others=others)
    again = read_predictions(tmp_path / "p.json", scale=TEN if pairs else Scale(low=0, high=100))
    assert again.scale == TEN, "the file names its scale"
    first = evaluate_items(items, found, scale=TEN, others=others)
    second = evaluate_items(again.items, again.found, scale=again.scale, others=again.others)
    assert to_json(first) == to_json(second) and set(first["metrics"]) <= set(TITLES)


def test_a_file_of_predictions_alone_gives_the_table_of_the_test(tmp_path: Path, capsys: Any) -> None:
    from crosstune.cli.main import main

    five, path = Scale(low=1, high=5), tmp_path / "p.json"
    items, found = scored(1, 4.5, 5, 2), [Judgement(score=s) for s in (1.5, 4.0, 3.0, 2.0)]
    others = baseline_verdicts(items, scale=five, train=scored(3, 3, 4))
    write_predictions(path, items, found, scale=five, others=others)
    assert main(["judge", "eval", "--predictions", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = evaluate_items(items, found, scale=five, others=others)["baselines"]
    assert to_json(report["baselines"]) == to_json(expected)
    assert main(["judge", "eval", "--predictions", str(path), "--score_scale", "1-4"]) == 2
    assert "outside the scale 1-4" in capsys.readouterr().err
    rows = [
        {"expected": row["expected"], "predicted": row["predicted"]} for row in json.loads(path.read_text())
    ]
    path.write_text(json.dumps(rows))
    assert main(["judge", "eval", "--predictions", str(path)]) == 0
    assert "fitted on the same items" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "loses"), [((9.0, 0.0), True), ((4.0, 8.0), False)])
def test_the_table_says_whether_the_judge_beats_its_baselines(own: tuple[float, ...], loses: bool) -> None:
    items = scored(4, 8)
    others = baseline_verdicts(items, scale=TEN, train=scored(8, 4))
    found = [Judgement(score=score) for score in own]
    lines = list(table_lines(evaluate_items(items, found, scale=TEN, others=others)))
    [lead] = [line for line in lines if "best baseline" in line]
    assert ("no better than this baseline" in lead) == loses and "human" not in lead


@pytest.mark.parametrize("num_groups", [2, FEW_GROUPS])
def test_intervals_from_few_groups_get_a_caution(num_groups: int) -> None:
    items = scored(*range(num_groups))
    found = [Judgement(score=float(place)) for place in range(num_groups)]
    notes = evaluate_items(items, found, scale=TEN)["notes"]
    assert any("too narrow" in note for note in notes) == (num_groups < FEW_GROUPS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("[1]", "Row 1"),
        ('[{"expected": 3, "predicted": "x"}]', "expected is a score"),
        ('[{"expected": "x", "predicted": 3}]', "neither a score nor a winner"),
        ('[{"expected": 3, "predicted": 11}]', "outside the scale 0-10"),
        ('[{"expected": 3, "predicted": 2, "confidence": 1e308}]', "confidence is 1e+308"),
        (
            '[{"expected": 3, "predicted": 2, "baselines": {"x": {"predicted": 1e308}}}]',
            "predicted is 1e+308",
        ),
        ('[{"expected": 3, "predicted": 2}, {"expected": "A", "predicted": "B"}]', "mixes"),
    ],
)
def test_bad_files_of_predictions(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_predictions(path, scale=TEN)
    assert words in str(error.value)


def test_settings_of_a_judge_read_back(tmp_path: Path) -> None:
    settings = JudgeSettings(verdict="score", scale="1-5", explains=True, temperature=1.7)
    settings.write(tmp_path)
    assert read_judge_settings(tmp_path) == settings
    assert read_judge_settings(tmp_path / "missing") is None
    (tmp_path / "judge.json").write_text(json.dumps({"verdict": "novel", "scale": "1-5"}))
    with pytest.raises(UserError, match="verdict"):
        read_judge_settings(tmp_path)


# presets


def report_of(name: str, gb: float = 24.0) -> BackendReport:
    device = Device(name="card", memory_total_bytes=int(gb * 1e9), memory_free_bytes=int(gb * 1e9))
    return BackendReport(
        name=name, engine="mlx" if name == "mlx" else "torch", available=True, device=name, devices=(device,)
    )


def chosen(name: str, gb: float = 24.0, **asked: Any) -> dict[str, Any]:
    found = choose_preset(make_config(recipe="judge", **asked), report_of(name, gb))
    return {option: preset.value for option, preset in found.items()}


@pytest.mark.parametrize("backend", ["mps", "cpu"])
def test_the_preset_of_laptops(backend: str) -> None:
    expected = {
        "precision": "fp32",
        "optimizer": "adamw",
        "batch_size": 1,
        "model_name": "Qwen/Qwen2-1.5B-Instruct",
    }
    expected |= {"train_type": "lora", "num_epochs": 3, "context_length": 512, "lr": 1e-4, "grad_norm": 1.0}
    assert expected.items() <= chosen(backend).items()


def test_the_preset_of_cuda() -> None:
    expected = {
        "train_type": "qlora",
        "quant_type": "nf4",
        "double_quant": True,
        "optimizer": "paged_adamw_8bit",
    }
    expected |= {"batch_size": 2, "use_gradient_checkpointing": True, "grad_norm": 0.3, "lr": 2e-4}
    expected |= {"model_name": "Qwen/Qwen2.5-3B-Instruct"}
    found = chosen("cuda", 12.0)
    assert expected.items() <= found.items() and "precision" not in found  # fp16 or bf16 by probe
    assert "quant_type" not in chosen("cuda", 12.0, no_4bit=True)


def test_small_and_large_cards() -> None:
    small, large = chosen("cuda", 8.5), chosen("cuda", 16.9)
    assert (small["batch_size"], small["gradient_accumulation_steps"], small["train_type"]) == (1, 4, "qlora")
    assert large["train_type"] == "lora" and "quant_type" not in large and large["batch_size"] == 2
    assert chosen("cuda", 16.9, model="org/Big-7B")["train_type"] == "qlora"  # does not fit without 4 bits
    assert chosen("cuda", 16.9, model="org/unknown")["train_type"] == "qlora"
    reason = choose_preset(make_config(recipe="judge"), report_of("cuda", 8.5))["batch_size"].reason
    assert "8 GiB" in reason


@pytest.mark.parametrize(
    "asked", [{}, {"batch_size": 4}, {"gradient_accumulation_steps": 3}, {"rows_per_step": 7}]
)
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_devices(asked: dict[str, Any]) -> None:
    """Unless the user sets the accumulation, which counts for each device."""
    rows = dict[int, int]()
    for world in (1, 2, 3, 8):
        found = chosen("cuda", 12.0, world_size=world, **asked)
        config = make_config(**{"recipe": "judge", "world_size": world} | found | asked)
        rows[world] = rows_per_step(config)
        assert rows[world] >= config.batch_size or "rows_per_step" not in found
    wanted = (
        {1: 6, 2: 12, 3: 18, 8: 48}
        if "gradient_accumulation_steps" in asked
        else dict.fromkeys(rows, rows[1])
    )
    assert rows == wanted


def test_the_preset_for_several_devices_has_no_shards_of_an_8bit_optimizer() -> None:
    found = chosen("cuda", 24.0, world_size=4)
    assert (found["sharding_strategy"], found["optimizer"]) == ("ddp", "paged_adamw_8bit")
    assert "sharding_strategy" not in chosen("cuda", 24.0) | chosen("cpu", world_size=2)
    for asked in ({"train_type": "full"}, {"sharding_strategy": "shard_grad_op"}):
        found = chosen("cuda", 24.0, world_size=4, **asked)
        assert not {"sharding_strategy", "optimizer"} & found.keys()


def test_what_was_asked_is_not_chosen() -> None:
    found = choose_preset(
        load_config(["--recipe", "judge", "--batch_size", "4", "--train_type", "full"]), report_of("cuda", 12)
    )
    assert "batch_size" not in found and "train_type" not in found and "lora_dropout" not in found


def test_large_models_get_smaller_adapters() -> None:
    assert chosen("mps", model="org/M-3B")["lora_rank"] == 8 and "lora_rank" not in chosen(
        "cuda", model="org/M-3B"
    )
    assert chosen("cuda", model="org/M-7B")["lora_alpha"] == 16


def test_a_moved_run_keeps_what_its_first_backend_chose() -> None:
    """The preset of another backend would change the training: its learning rate, its batches, its model."""
    from types import SimpleNamespace

    from crosstune.runs.resume import kept_options

    options = {
        "lr": 1e-4,
        "batch_size": 1,
        "model_name": "x",
        "precision": "fp32",
        "seed": 7,
        "grad_norm": 1.0,
    }
    manifest = make_manifest(recipe="judge", options=options, backend="mps")
    checkpoint: Any = SimpleNamespace(manifest=manifest, folder=Path("runs/a/checkpoints/step-1"))
    kept = kept_options(checkpoint, {"lr": 3e-4}, backend="cuda")
    assert kept == {"batch_size": 1, "model_name": "x", "grad_norm": 1.0, "data_rules": 1}
    other: Any = SimpleNamespace(manifest=replace(manifest, recipe="sft"), folder=checkpoint.folder)
    assert kept_options(other, {}, backend="cuda") == {"data_rules": 1}
