"""Exchange adapters between presets and engines: the same verdicts, or an error if impossible."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.main import main
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.recipes.judge.items import Item, Scale
from crosstune.recipes.judge.open_splits import open_judge_data
from crosstune.results.judge import measure_judge
from crosstune.runs.judges import JudgeRequest, open_judge, run_config

ENGINES = {"torch": "cpu", "mlx": "mlx"}
ITEMS = [Item(id=str(n), group=str(n), task=f"write {n} words", answers=("a good text",)) for n in range(2)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge_data")
    for split, count in (("train", 12), ("val", 2), ("test", 6)):
        texts = ("a good text", "a bad text")
        rows = [
            {"task": f"{split} {n}", "answer": texts[n % 2], "score": 9.5 - 9 * (n % 2)} for n in range(count)
        ]
        (folder / f"judge_{split}.json").write_text(json.dumps(rows))
    return folder


def train_preset(model: Path, data: Path, folder: Path, backend: str) -> tuple[Path, Config]:
    """Train with the preset of a backend, but for the learning rate and the number of steps."""
    flags = {"model_name": model, "dataset": data, "backend": backend, "max_steps": 3, "lr": 1e-2}
    flags |= {"skip_eval": True, "output_dir": folder, "name": backend}
    assert (
        main(
            ["judge", "train", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
        )
        == 0
    )
    config = run_config(folder / backend)
    assert config is not None and (config.batch_size, config.lora_dropout) == (
        2 if backend == "cuda" else 1,
        0.05,
    )
    return folder / backend, config


def scores_of(run: Path, config: Config, backend: str, **more: Any) -> Any:
    test = open_judge_data(config).test
    request = JudgeRequest(target=str(run), backend=backend, **more)
    judge = open_judge(request, items=test, config=config, observer=Observers())
    return np.array([one.score for one in judge.judge(test)])


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Config]]:
    """Runs with the preset of MPS, which is that of the CPU, and with the preset of MLX."""
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    folder = tmp_path_factory.mktemp("presets")
    return {engine: train_preset(tiny_model, data, folder, backend) for engine, backend in ENGINES.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_gives_the_same_verdicts_on_the_other_engine(
    trained: dict[str, tuple[Path, Config]], engine: str
) -> None:
    run, config = trained[engine]
    scores = {name: scores_of(run, config, backend) for name, backend in ENGINES.items()}
    assert scores["mlx"] == pytest.approx(scores["torch"], abs=1e-3)
    assert np.abs(scores["torch"] - scores_of(run, config, "cpu", untrained=True)).max() > 0.01


@pytest.mark.cuda
def test_adapters_of_the_cuda_preset_and_of_laptops_judge_in_each_others_place(
    trained: dict[str, tuple[Path, Config]], tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    run, config = train_preset(tiny_model, data, tmp_path, "cuda")
    on_card = scores_of(run, config, "cuda")
    assert scores_of(run, config, "cpu") == pytest.approx(on_card, abs=2e-2), "over the same NF4 base"
    for laptop, options_of in trained.values():
        assert scores_of(laptop, options_of, "cuda") == pytest.approx(
            scores_of(laptop, options_of, "cpu"), abs=1e-3
        )


def test_an_adapter_for_another_base_is_refused(
    trained: dict[str, tuple[Path, Config]], tmp_path: Path
) -> None:
    from crosstune.models.tiny import tiny_model as make

    run, config = trained["torch"]
    other = make(tmp_path / "other", seed=5)
    request = JudgeRequest(target=str(run / "adapter"), base=str(other), backend="cpu")
    with pytest.raises(UserError, match="trained on a different base"):
        measure_judge(request, ITEMS, config=config, observer=Observers())


def test_scores_on_another_scale_are_refused(trained: dict[str, tuple[Path, Config]]) -> None:
    run, config = trained["torch"]
    asked = [replace(one, score=80.0, scale=Scale(low=0, high=100)) for one in ITEMS]
    with pytest.raises(UserError, match="scores on the scale 0-10, but the data is on 0-100"):
        measure_judge(JudgeRequest(target=str(run)), asked, config=config, observer=Observers())
