"""What a sweep reads, how it chooses and stops trials, its record and its page; without training."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from report_runs import damaged

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.config.resolve.resolve import resolve
from crosstune.core.errors import UserError
from crosstune.estimate.machine import Device, Machine
from crosstune.planner.gather import gather
from crosstune.report.trial_pages import render_sweep
from crosstune.runs.trials import check_same_request
from crosstune.sweep.choose import (
    Dimension,
    Space,
    Trial,
    choose,
    combinations,
    importances,
    num_combinations,
    pruned_at,
    read_space,
)
from crosstune.sweep.run import Sweep, device_slots


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=1e-4..1e-3:log", Dimension(name="lr", low=1e-4, high=1e-3, is_log=True)),
        ("learning_rate=0.1..0.2", Dimension(name="lr", low=0.1, high=0.2)),
        ("lora-rank=8..64", Dimension(name="lora_rank", low=8, high=64, is_integer=True)),
        ("lora_rank=8, 16,32,8", Dimension(name="lora_rank", choices=(8, 16, 32))),
        ("packing=true,no", Dimension(name="packing", choices=(True, False))),
        ("batch_size=auto,4", Dimension(name="batch_size", choices=("auto", 4))),
        ("dataset=../a.jsonl,../b.jsonl", Dimension(name="dataset", choices=("../a.jsonl", "../b.jsonl"))),
        (
            "lora_target_modules=q_proj,v_proj;k_proj",
            Dimension(name="lora_target_modules", choices=("q_proj,v_proj", "k_proj")),
        ),
    ],
)
def test_values_are_read(text: str, found: Dimension) -> None:
    assert read_space([text]) == {found.name: found}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lora_rnk=8,16", "did you mean lora_rank"),
        ("lr", "has no values"),
        ("lr=", "has no values"),
        ("lr=1e-4..", "not a range with two bounds"),
        ("lr=..1e-3", "not a range with two bounds"),
        ("lr=1e-4..1e-3..1e-2", "not a range with two bounds"),
        ("lr=1e-3..1e-4", "empty range"),
        ("lr=0..1:log", "cannot be logarithmic"),
        ("lr=0.1", "a single value"),
        ("lora_rank=8,x", "lora_rank cannot be 'x'"),
        ("lora_rank=0..8", "lora_rank cannot be 0"),
        ("train_type=lora,qlra", "did you mean qlora"),
        ("resume=auto,none", "cannot vary resume"),
    ],
)
def test_what_cannot_be_varied_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_space(["seed=1,2", text])
    assert said in "\n".join(refused.value.lines())


def score(params: dict[str, Any]) -> float:
    return abs(math.log10(params["lr"]) + 3.3) + abs(params["lora_rank"] - 16) / 16


SPACE = read_space(["lr=1e-4..1e-2:log", "lora_rank=8,16,32"])


def ended(trials: list[Trial], space: Space = SPACE, *, until: int) -> list[Trial]:
    """Return these trials and the next ones, as a sweep of one trial at a time ends them."""
    trials = list(trials)
    while len(trials) < until:
        params = choose(space, trials, seed=7, maximize=False)
        assert params is not None
        known = [trial.number for trial in trials]
        trial = Trial(number=len(trials), params=params, known=known, status="finished", value=score(params))
        trials.append(trial)
    return trials


def test_a_choice_follows_from_the_seed_and_the_ended_trials() -> None:
    whole = ended([], until=14)
    for kept in (1, 6, 11):  # a record that was read again
        rows = json.loads(json.dumps([dataclasses.asdict(trial) for trial in whole[:kept]]))
        assert ended([Trial(**row) for row in rows], until=14) == whole
    assert choose(SPACE, whole, seed=8, maximize=False) != choose(SPACE, whole, seed=7, maximize=False)
    assert min(score(trial.params) for trial in ended(whole, until=30)) < 0.1, "Optuna finds the best corner"
    for trial in whole:
        assert 1e-4 <= trial.params["lr"] <= 1e-2 and len(f"{trial.params['lr']:.15g}".strip("0.")) <= 5


def test_a_failed_trial_counts_as_worse_than_all_others() -> None:
    trials = ended([], until=12)
    best = min(trials, key=lambda trial: trial.value or 0.0)
    diverged = [
        dataclasses.replace(t, status="failed", value=None) if t.params["lr"] < 1e-3 else t for t in trials
    ]
    assert best.params["lr"] < 1e-3
    drawn = [choose(SPACE, diverged, seed=seed, maximize=False) for seed in range(8)]
    assert sum(params is not None and params["lr"] > 1e-3 for params in drawn) > 4


def test_a_running_trial_is_not_repeated() -> None:
    trials = ended([], until=8)
    params = choose(SPACE, trials, seed=7, maximize=False)
    assert params is not None
    running = Trial(number=8, params=params, known=[])
    assert choose(SPACE, [*trials, running], seed=7, maximize=False) != params


def test_no_combination_is_tried_twice() -> None:
    space = read_space(["lora_rank=8..10", "packing=true,false"])
    trials: list[Trial] = []
    while (params := choose(space, trials, seed=1, maximize=True)) is not None:
        trials.append(Trial(number=len(trials), params=params, known=[], status="finished", value=1.0))
    tried = [trial.params for trial in trials]
    assert len(tried) == 6 and all(params in tried for params in combinations(space))


def test_many_combinations_are_counted_and_not_listed() -> None:
    space = read_space(["seed=0..4000000000", "lora_rank=4,8"])
    assert num_combinations(space) == 2 * 4_000_000_001 and combinations(space) == []
    assert num_combinations(read_space(["lr=1e-5..1e-3", "lora_rank=4,8"])) == math.inf


def test_a_trial_below_the_median_is_stopped_from_its_second_evaluation() -> None:
    others = [
        Trial(number=n, params={}, known=[], status="finished", evaluations={"4": at_4, "8": at_8})
        for n, (at_4, at_8) in enumerate([(3.0, 2.0), (3.0, 2.2), (3.0, 2.4)])
    ]
    assert pruned_at({4: 9.0}, others, maximize=False) is None
    assert pruned_at({4: 9.0, 8: 2.1}, others, maximize=False) is None
    assert pruned_at({4: 9.0, 8: 2.3, 12: 0.1}, others, maximize=False) == 8
    assert pruned_at({4: 9.0, 8: None}, others, maximize=False) == 8
    assert pruned_at({4: 1.0, 8: 2.3}, others, maximize=False) is None, "its best counts"
    assert pruned_at({4: 1.0, 8: 2.3}, others, maximize=True) is None
    assert pruned_at({4: 1.0, 8: 2.1}, others, maximize=True) == 8
    assert pruned_at({4: 9.0, 8: 9.0}, others[:2], maximize=False) is None, "too few to compare with"
    stopped = [*others[:2], dataclasses.replace(others[2], status="pruned")]
    assert pruned_at({4: 9.0, 8: 9.0}, stopped, maximize=False) is None


def test_importance_needs_several_finished_trials() -> None:
    trials = ended([], until=20)
    assert importances(SPACE, trials[:3], maximize=False) == {}
    found = importances(SPACE, trials, maximize=False)
    assert found.keys() == SPACE.keys() and sum(found.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("num_devices", "world_size", "parallel", "given", "devices"),
    [
        (1, 1, None, None, [None]),
        (1, 1, 3, None, [None] * 3),
        (4, 1, None, None, ["0", "1", "2", "3"]),
        (4, 2, None, None, ["0,1", "2,3"]),
        (4, 4, None, None, [None]),
        (2, 1, 3, None, ["0", "1", "0"]),
        (2, 1, None, "6, 7", ["6", "7"]),
    ],
)
def test_each_parallel_trial_has_its_own_devices(
    num_devices: int,
    world_size: int,
    parallel: int | None,
    given: str | None,
    devices: list[str | None],
    cpu_laptop: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    config = make_config(model_name="tiny-random", backend="cpu")
    plan = resolve(config, gather(config, machine=cpu_laptop))
    device = Device(name="GPU", memory_total_bytes=1, memory_free_bytes=1)
    gpus = dataclasses.replace(plan.backend, name="cuda", devices=(device,) * num_devices)
    found = device_slots(dataclasses.replace(plan, backend=gpus, world_size=world_size), parallel)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in found] == devices
    assert device_slots(plan, 2) == [{}, {}], "a CPU has no devices to select"


def opened(folder: Path, text: str | None = None, **more: Any) -> Sweep:
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / "sweep.json").write_text(text)
    common: dict[str, Any] = {"metric": "loss", "maximize": False, "num_trials": 9, "asked": {}, "seed": 7}
    return Sweep(folder=folder, space=SPACE, prunes=True, slots=[{}], **{**common, **more})


def test_the_record_is_read_again_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    sweep = opened(tmp_path)
    sweep.trials = ended([], until=6)
    sweep.write()
    again = opened(tmp_path)
    assert again.trials == sweep.trials and again.best == min(
        sweep.trials, key=lambda trial: trial.value or 0
    )
    whole = (tmp_path / "sweep.json").read_text()
    for text in (
        whole[:-20],
        "{}",
        '{"trials": 3}',
        whole.replace('"lora_rank"', '"rank"'),
        whole.replace('"number": 2', '"number": 3'),
        whole.replace('"known"', '"unknown"'),
    ):
        with pytest.raises(UserError, match="damaged") as refused:
            opened(tmp_path, text)
        assert "--overwrite" in refused.value.do


def test_another_definition_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    request = {"options": {"lora_rank": 8}, "over": ["lr=1..2"], "metric": "loss"}
    check_same_request(tmp_path / "s", request, kind="sweep")
    trial = tmp_path / "s" / "trials" / "trial-000"
    trial.mkdir(parents=True)
    (trial / "plan.json").write_text("{}")
    check_same_request(tmp_path / "s", request, kind="sweep")
    with pytest.raises(UserError, match="a different request") as refused:
        check_same_request(tmp_path / "s", {**request, "over": ["lr=1..3"], "options": {}}, kind="sweep")
    assert refused.value.why == "these differ: --lora_rank, --over."
    (trial / "plan.json").unlink()  # no trial began: the new request replaces it, without leftovers
    check_same_request(tmp_path / "s", {**request, "over": ["lr=1..3"]}, kind="sweep")
    assert not trial.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "There is nothing to vary"),
        ("--over lr=1,2 --trials 0", "'0' is not an integer of at least 1"),
        ("--over lr=1,2 --lr 3", "lr is set and varied"),
        ("--over lr=1,2 --skip_eval", "--skip_eval"),
        ("--over lr=1,2 --time_limit 3h", "--max_steps limits all trials"),
        ("--over lr=1,2 --metric eval_strangeness", "--goal min or --goal max"),
        ("--over lr=1,2 --over seed=1..", "not a range with two bounds"),
    ],
)
def test_a_request_without_a_meaning_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--output_dir", str(tmp_path), *words.split()]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_optuna_the_command_to_install_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    assert main(["sweep", "--over", "lr=1,2", "--output_dir", str(tmp_path)]) == 2
    assert "pip install 'crosstune[sweep]'" in capsys.readouterr().err


def test_the_page_shows_every_trial_and_trusts_no_text(tmp_path: Path) -> None:
    sweep = opened(tmp_path)
    sweep.trials = ended([], until=6)
    sweep.trials[1].evaluations = {"4": 3.0, "8": 2.5}
    sweep.trials[2].status, sweep.trials[2].value = "pruned", None
    sweep.trials[3].status, sweep.trials[3].error = "failed", "exit code 2: <script>alert(1)</script>"
    found = json.loads(json.dumps(sweep.to_json()))
    page = render_sweep(found, name="<b>s</b>", command="crosstune train --config s/best.yaml")
    assert page.count("<path class=") >= 4 and 'class="best"' in page and "PED-ANOVA" in page
    assert "<script>alert" not in page and "<b>s</b>" not in page and "&lt;script&gt;" in page
    assert sweep.best is not None and f"{sweep.best.name} has the lowest eval_loss of 6 trials" in page
    found["trials"][0] |= {"value": "<i>", "params": {"lr": [[]], "lora_rank": None}, "evaluations": None}
    assert "<i>" not in render_sweep(found, name="s", command="c")


def test_a_damaged_record_never_stops_the_page(tmp_path: Path) -> None:
    sweep = opened(tmp_path)
    sweep.trials = ended([], until=6)
    for trial in sweep.trials:
        trial.evaluations = {"4": 3.0, "8": 2.5}
    found = json.loads(json.dumps(sweep.to_json()))
    for seed in range(60):
        source = random.Random(seed)
        broken = {key: damaged(value, source) for key, value in found.items()}
        assert "</html>" in render_sweep(broken, name="s", command="")
    odd = {"x": 1.0, "9" * 400: 2.0, "-1": 0.0, "4": 1.0}
    for each in (
        {"trials": [5, {"evaluations": odd, "params": [1]}]},
        {},
        {"over": {}, "trials": [{"value": 1}]},
    ):
        assert "</html>" in render_sweep(each, name="s", command="")
