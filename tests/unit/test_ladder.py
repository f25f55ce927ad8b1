"""The ladder's verdicts on made-up trials, the proposals of its rungs, and its requests."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.commands.ladder import why_none_kept
from crosstune.config.load import make_config
from crosstune.config.resolve.resolve import resolve
from crosstune.core.errors import UserError
from crosstune.estimate.machine import Machine
from crosstune.ladder.climb import Climbed, Step, make_request
from crosstune.ladder.compare import Comparison, broken_promise, judge
from crosstune.ladder.rung import AsGood, NotApplicable, SameBits, Situation, Within
from crosstune.ladder.rungs import all_rungs
from crosstune.ladder.trial import Trial, Trials
from crosstune.planner.gather import gather
from crosstune.runs.trials import FOLLOWING, check_same_request, check_trial_request, why_ended

LOSSES = [3.0, 2.5, 2.2, 2.0, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3]


def trial(
    losses: Sequence[float] = LOSSES, *, rate: float = 100.0, peak: int = 1000, weight: int = 10, **more: Any
) -> Trial:
    rows = [
        {"step": step, "loss": loss, "tokens": 100, "supervised_tokens": weight, "step_s": 100 / rate}
        for step, loss in enumerate(losses, start=1)
    ]
    return Trial(name="t", **{"status": "finished", "warmup": 2, "rows": rows, "peak_bytes": peak} | more)


def against(*new: Trial, base: Sequence[Trial] = (trial(), trial())) -> Comparison:
    return Comparison(base=base, new=new)


@pytest.mark.parametrize(
    ("promise", "losses", "kept"),
    [
        (SameBits(), LOSSES, True),
        (SameBits(), [*LOSSES[:-1], math.nextafter(1.3, 2)], False),
        (Within(bound=1e-3), [*LOSSES[:5], 1.7 * 1.002, *LOSSES[6:]], False),
        (Within(bound=1e-3), [*LOSSES[:-1], math.nan], False),
        (AsGood(bound=0.05), [9.0, *LOSSES[1:]], True),
        (AsGood(bound=0.05), [*LOSSES[:7], 1.7, 1.7, 1.7], False),
    ],
)
def test_a_promise_about_the_loss(promise: Any, losses: list[float], kept: bool) -> None:
    assert (broken_promise(against(trial(losses)), promise) == "") is kept


def test_a_baseline_that_does_not_repeat_itself_widens_same_bits_but_little() -> None:
    other = trial([*LOSSES[:-1], 1.3 * (1 + 1e-6)])
    base = (trial(), other)
    assert broken_promise(against(trial([*LOSSES[:-1], 1.3 * (1 + 1.5e-6)]), base=base), SameBits()) == ""
    told = broken_promise(against(trial([*LOSSES[:-1], 1.3 * (1 + 1e-5)]), base=base), SameBits())
    assert "1.0e-05" in told and "repeats itself within 1.0e-06" in told


def test_other_rows_per_step_are_compared_at_equal_tokens() -> None:
    """Half as many steps with twice the tokens each and the same course of the loss."""
    packed = trial(LOSSES[1::2], weight=20)
    assert broken_promise(against(packed), AsGood(bound=0.1)) == ""
    assert "instead of" in broken_promise(against(trial([3.0] * 5, weight=20)), AsGood(bound=0.1))


@pytest.mark.parametrize(
    ("goal", "gain", "rate", "peak", "kept"),
    [
        ("speed", "speed", 130, 1000, True),
        ("speed", "speed", 101, 1000, False),
        ("speed", "speed", 70, 500, False),
        ("speed", "memory", 100, 500, True),
        ("memory", "memory", 70, 500, True),
        ("memory", "speed", 130, 2000, False),
        ("speed", "safety", 80, 1000, False),
    ],
)
def test_what_helps_is_kept(goal: Any, gain: Any, rate: float, peak: int, kept: bool) -> None:
    made = against(trial(rate=rate, peak=peak), trial(rate=rate, peak=peak))
    assert judge(made, promise=SameBits(), gain=gain, goal=goal).kept is kept


def test_a_gain_within_the_noise_is_none_and_a_loaded_machine_is_named() -> None:
    noisy = against(trial(rate=120), trial(rate=115), base=(trial(rate=80), trial(rate=120)))
    verdict = judge(noisy, promise=SameBits(), gain="speed", goal="speed")
    assert not verdict.kept and "something else uses this machine" in verdict.why


def test_on_a_loaded_cpu_processor_time_is_compared() -> None:
    def loaded(rate: float, *, cpu_rate: float, **more: Any) -> Trial:
        rows = [{**row, "cpu_s": 100 / cpu_rate} for row in trial(rate=rate).rows]
        return trial(rate=rate, **{"rows": rows, "on_one_cpu": True} | more)

    base = (loaded(80, cpu_rate=100), loaded(120, cpu_rate=101))
    faster = against(loaded(60, cpu_rate=130), loaded(115, cpu_rate=131), base=base)
    verdict = judge(faster, promise=SameBits(), gain="speed", goal="speed")
    assert verdict.kept and faster.speed == pytest.approx(130.5 / 100.5) and "CPU time" in verdict.why
    several = against(loaded(60, cpu_rate=999, on_one_cpu=False), loaded(90, cpu_rate=999), base=base)
    assert not several.by_cpu_time, "the CPU time of one process of several is not the speed"


def test_steps_that_are_not_finite_are_not_kept() -> None:
    made = against(trial(rate=200, num_nonfinite=1), trial(rate=200))
    assert "1 steps were not finite" in judge(made, promise=SameBits(), gain="speed", goal="speed").why


def situation(machine: Machine, *, mean: float = 60.0, longest: int = 400, **options: Any) -> Situation:
    config = make_config(model_name="tiny-random", backend="cpu", **options)
    plan = resolve(config, gather(config, machine=machine))
    return Situation(config=plan.config, plan=plan, mean_tokens=mean, longest_tokens=longest)


def test_every_rung_proposes_options_that_exist_or_says_why_not(cpu_laptop: Machine) -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"train_type": "full", "batch_size": 1, "gradient_accumulation_steps": 8, "keep_last_n": 99},
        {"use_gradient_checkpointing": True, "use_flash_attention": False, "packing": True},
        {"world_size": 2, "collective_timeout": "20d"},
    ]
    proposed: set[str] = set()
    for options in shapes:
        for name, rung in all_rungs().items():
            try:
                changes = rung.propose(situation(cpu_laptop, **options))
            except NotApplicable as reason:
                assert str(reason)
                continue
            proposed.add(name)
            assert changes
            for change in changes:
                make_config(**options | dict(change))
    assert {"larger_batch", "packing", "checkpoint_rotation", "time_limits", "replicas"} <= proposed


def test_micro_batches_grow_while_a_step_keeps_its_rows(cpu_laptop: Machine) -> None:
    changes = all_rungs()["larger_batch"].propose(
        situation(cpu_laptop, batch_size=3, gradient_accumulation_steps=4)
    )
    assert [c["batch_size"] * c["gradient_accumulation_steps"] for c in changes] == [12, 12]


def test_packed_rows_hold_about_a_step_and_never_less_than_the_longest_example(cpu_laptop: Machine) -> None:
    (change,) = all_rungs()["packing"].propose(situation(cpu_laptop, batch_size=8))
    assert change["context_length"] == 512 and change["batch_size"] == 1
    with pytest.raises(NotApplicable, match="same length"):
        all_rungs()["packing"].propose(situation(cpu_laptop, mean=399.0))


same_ladder = functools.partial(check_same_request, kind="ladder")


def request(steps: int, **options: Any) -> dict[str, Any]:
    return make_request(make_config(**options), rungs=["packing"], steps=steps, goal="speed")


def test_a_folder_is_continued_by_the_same_request_alone(tmp_path: Path) -> None:
    same_ladder(tmp_path / "l", request(2))  # which measured nothing, and is replaced
    same_ladder(tmp_path / "l", request(3, lr=0.1, name="l", overwrite=True))
    (tmp_path / "l" / "trials" / "baseline").mkdir(parents=True)
    (tmp_path / "l" / "trials" / "baseline" / "plan.json").write_text("{}")
    same_ladder(tmp_path / "l", request(3, lr=0.1, output_dir=str(tmp_path)))  # where it is does not matter
    with pytest.raises(UserError) as refused:
        same_ladder(tmp_path / "l", request(4, lr=0.2))
    assert refused.value.why == "these differ: --lr, --steps."
    (tmp_path / "l" / "request.json").write_text("{")
    with pytest.raises(UserError, match="damaged") as damaged:
        same_ladder(tmp_path / "l", request(3))
    assert "--overwrite" in damaged.value.do
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not a ladder"):
        same_ladder(tmp_path / "mine", {})


@pytest.mark.parametrize(
    ("options", "said"),
    [({"resume": "runs/a"}, "cannot start from --resume runs/a"), ({"emulate": "mps"}, "--emulate")],
)
def test_a_request_that_no_trial_could_have_is_refused_before_the_first(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_trial_request(make_config(**options), kind="ladder")


def test_one_ladder_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    from crosstune.cli.commands.ladder import run
    from crosstune.files.run_lock import InUse, hold

    words = ["--model_name", "tiny-random", "--backend", "cpu", "--name", "l", "--output_dir", str(tmp_path)]
    with hold(tmp_path / "l"), pytest.raises(InUse):
        run([*words, "--overwrite", "true"])


def test_a_trial_does_not_outlive_its_ladder() -> None:
    not_its_parent = str(os.getppid())
    words = [sys.executable, "-c", FOLLOWING, not_its_parent, "train", "--model_name", "tiny-random"]
    assert subprocess.run(words, check=False).returncode == -signal.SIGTERM


def test_a_finished_trial_is_read_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    import yaml

    trials, folder = Trials(folder=tmp_path, steps=2, warmup=1, limit_s=1.0), tmp_path / "baseline"
    folder.mkdir()
    asked = {"lr": 0.1}
    whole = {
        "../baseline.yaml": yaml.safe_dump(asked),
        "plan.json": '{"options": {}}',
        "summary.json": '{"status": "finished", "seconds": 3}',
        "metrics.jsonl": '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n',
    }
    for name, text in whole.items():
        (folder / name).write_text(text)
    done = trials.read_finished(folder, asked)
    assert done is not None and done.values("loss") == [2.0, 1.0] and done.seconds == 3
    assert trials.read_finished(folder, {"lr": 0.2}) is None
    for name, text in whole.items():
        (folder / name).write_bytes(text.encode()[:-4] + b"\xff{")
        assert trials.read_finished(folder, asked) is None, name
        (folder / name).unlink()
        assert trials.read_finished(folder, asked) is None, name
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "killed by SIGKILL, as the system does when memory runs out; last output: step 3"),
        (-15, "killed by SIGTERM; last output: step 3"),
        (1, "exit code 1: step 3"),
        (3, "exit code 3, without output"),
    ],
)
def test_why_a_trial_died(code: int, said: str, tmp_path: Path) -> None:
    log, ends = (
        tmp_path / "log",
        f"os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})",
    )
    if "step 3" in said:
        ends = f"print('step 3', flush=True); {ends}"
    with log.open("wb") as out:
        done = subprocess.run([sys.executable, "-c", f"import os; {ends}"], stdout=out, check=False)
    assert why_ended(done.returncode, log) == said


def test_what_was_not_measured_is_not_called_worse() -> None:
    died, worse = against(trial(status="failed")), against(trial(rate=50.0))
    for comparisons, said in (
        ([died], "no change could be measured; the lines above say why"),
        ([None], "no change could be measured; the lines above say why"),
        ([worse], "no measured change was an improvement"),
        ([worse, died], "no measured change was an improvement; 1 could not be measured"),
        ([], "none applies to this run"),
    ):
        steps = [
            Step(rung="r", title="", outcome="rolled back", why="", comparison=each) for each in comparisons
        ]
        assert why_none_kept(Climbed(asked={}, options={}, steps=steps, ends=None, criteria=[])) == said


def test_the_page_shows_what_each_rung_led_to_and_escapes_what_was_said() -> None:
    from crosstune.report.trial_pages import render_ladder, waterfall

    def rung(name: str, outcome: str, speed: float | None) -> dict[str, Any]:
        measured = {"speed": speed, "memory": 0.5} if speed else None
        return {"rung": name, "title": name, "outcome": outcome, "why": "<b>", "measured": measured}

    rungs = [
        rung("a", "kept", 1.5),
        rung("b", "rolled back", 0.5),
        rung("c", "kept", 2.0),
        rung("d", "no", None),
    ]
    assert [bar["speed"] for bar in waterfall(rungs)] == [1.5, 0.75, 3.0, None]
    assert [bar["memory"] for bar in waterfall(rungs)] == [0.5, 0.25, 0.25, None]
    ends = against(trial(rate=140), trial(rate=142)).to_json()
    page = render_ladder(
        {"rungs": rungs, "ends": ends, "criteria": []}, name="<x>", command="crosstune train"
    )
    assert "&lt;b&gt;" in page and "<x>" not in page and "141 tok/s" in page
    assert "No change was kept" in render_ladder({"rungs": "damaged"}, name="x", command="y")
