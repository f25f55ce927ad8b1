"""Runs of the rl recipe: the same numbers in generator and training pass, on both engines, after kills and in any layout."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rewards import use_rewards, vowels

import crosstune
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.core.rewards import ScoredAnswer
from crosstune.data.batches.forked import ForkedBatch
from crosstune.files.json_files import read_jsonl
from crosstune.loop.step import prepare_window
from crosstune.planner.gather import make_plan
from crosstune.recipes.rl.rewards.open_rewards import open_rewards
from crosstune.recipes.rl.rollouts import Generator, Rollouts
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.restore import compare_losses, measure_loss

TIMES = ("time/", "step_s", "cpu_s", "tokens_per_s", "memory_bytes")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"Say {number} words.", "answer": str(number)} for number in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    use_rewards(monkeypatch, {"vowels": vowels, "short": lambda answer: -len(answer.answer)}, [1.0, 0.01])


def options(prompts: Path, home: Path, **more: Any) -> dict[str, Any]:
    return {
        "recipe": "rl", "reward": "json", "model_name": "tiny-random", "dataset": str(prompts), "batch_size": 2, "lr": 1e-2, "wd": 0.0,
        "gradient_accumulation_steps": 2, "num_generations": 3, "max_new_tokens": 6, "lora_rank": 4, "backend": "cpu",
        "precision": "fp32", "skip_eval": True, "max_steps": 4, "output_dir": str(home), "name": "run", **more,
    }  # fmt: skip


def train(prompts: Path, home: Path, **more: Any) -> list[dict[str, Any]]:
    """Train, and return the metrics of all steps without times."""
    run = crosstune.train(**options(prompts, home, **more))
    return metrics_of(run.folder)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def open_both(prompts: Path, **more: Any) -> tuple[Any, Any]:
    """Return the recipe and a session that is ready for steps."""
    given = options(prompts, Path(), **more)
    config = make_config(
        **{name: value for name, value in given.items() if name not in ("output_dir", "name")}
    )
    plan = make_plan(config)
    model = find_model(config, Observers())
    recipe = open_recipe(plan.config, model, Observers())
    recipe.configure(plan.config)
    session = open_session(plan, model, task=recipe.task(plan.engine))
    recipe.prepare_session(session, folder=Path(), earlier=None, writes=True, observer=Observers())
    return recipe, session


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_the_generator_and_the_training_pass_have_the_same_log_probabilities(
    prompts: Path, backend: str
) -> None:
    for temperature in (1.0, 0.6):
        recipe, session = open_both(prompts, backend=backend, temperature=temperature)
        batches = recipe.make_batches(session, 0, observer=Observers())
        found = session.task.token_log_probs(session, batches, reference=False)
        assert isinstance(batches[0].tokens, ForkedBatch) and len(batches) == 2
        for batch, values in zip(batches, found, strict=True):
            np.testing.assert_allclose(values, batch.of_tokens["sampler"], atol=1e-5)
        result = session.backward(prepare_window(session, batches))
        assert result.metrics["sampling/sampling_logp_difference/max"] < 1e-5
        assert result.metrics["entropy"] > 1


def test_a_long_answer_and_its_training_pass_agree_in_separate_rows(prompts: Path) -> None:
    rows = [
        train(
            prompts,
            prompts.parent,
            name=f"shared-{shares}",
            share_prompts=shares,
            max_steps=2,
            max_new_tokens=24,
        )
        for shares in (True, False)
    ]
    for shared, separate in zip(*rows, strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward"):
            assert shared[name] == pytest.approx(separate[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "more",
    [
        {"rl_loss": "dapo"},
        {"rl_loss": "grpo", "beta": 0.1, "num_iterations": 2, "importance_correction": "sequence"},
        {"rl_loss": "rloo", "mask_truncated": True, "max_new_tokens": 40},
        {"rl_loss": "gspo", "num_iterations": 2, "temperature": 0.7},
        {"rl_loss": "reinforce", "scale_rewards": "batch"},
    ],
    ids=lambda more: more["rl_loss"],
)
def test_both_engines_agree(prompts: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    found, expected = (
        train(prompts, tmp_path, name=backend, backend=backend, lr=1e-3, **more) for backend in ("mlx", "cpu")
    )
    assert len(expected) == 4 and any(row["grad_norm"] > 0.01 for row in expected)
    for row, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            if isinstance(value, float) and "sampling_logp" not in name:
                assert row[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


def _kill_in(owner: Any, name: str, count: int) -> None:
    """Kill this process in call `count` of a method."""
    method, calls = getattr(owner, name), [0]

    def run(*args: Any, **parts: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **parts)

    setattr(owner, name, run)


def _train_in_a_child(asked: Mapping[str, Any], prepare: Callable[[], None]) -> int:
    """Return how the child process ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            prepare()
            crosstune.train(**asked)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_killed_in_any_phase_it_continues_bit_by_bit(prompts: Path, tmp_path: Path) -> None:
    from crosstune.recipes.rl.recipe import RlRecipe
    from crosstune.torch_engine.session.text_session import TextSession

    more: dict[str, Any] = {
        "num_iterations": 2, "beta": 0.05, "lora_dropout": 0.1, "max_steps": 6, "save_steps": 1, "keep_last_n": 9,
        "dynamic_sampling": 1,
    }  # fmt: skip
    straight = train(prompts, tmp_path, name="straight", **more)
    phases = {
        "generate": (Generator, "answer", 2), "reward": (Generator, "score", 2), "log_probs": (RlRecipe, "_with_log_probs", 3),
        "backward": (TextSession, "backward", 2), "update": (TextSession, "update", 3), "save": (TextSession, "export_state", 4),
    }  # fmt: skip
    for phase, (owner, method, count) in phases.items():
        asked = options(prompts, tmp_path, name=phase, **more)
        ended = _train_in_a_child(asked, lambda a=owner, b=method, c=count: _kill_in(a, b, c))
        assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL, phase
        assert train(prompts, tmp_path, name=phase, resume="auto", **more) == straight, phase


def test_a_checkpoint_between_two_steps_on_the_same_answers_has_them(prompts: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"num_iterations": 3, "max_steps": 3, "save_steps": 1, "keep_last_n": 9}
    straight = train(prompts, tmp_path, **more)
    assert len({row["reward"] for row in straight}) == 1 and len({row["loss"] for row in straight}) == 3
    for step in (1, 2):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:08}"
        assert train(prompts, tmp_path, name=f"from-{step}", resume=str(checkpoint), **more) == straight
    on_mlx = train(prompts, tmp_path, name="mlx", backend="mlx", resume=str(checkpoint), **more)
    assert on_mlx[2]["loss"] == pytest.approx(straight[2]["loss"], abs=1e-5)


def test_stored_answers_are_the_same_answers(prompts: Path) -> None:
    recipe, session = open_both(prompts, num_iterations=2, beta=0.1)
    recipe.make_batches(session, 0, observer=Observers())
    kept = recipe._rollouts
    again = Rollouts.from_arrays(kept.to_arrays())
    np.testing.assert_array_equal(again.scores, kept.scores)
    for group, other in zip(kept.groups, again.groups, strict=True):
        for one, two in zip(group, other, strict=True):
            assert (one.prompt, list(one.tokens), one.stopped) == (two.prompt, list(two.tokens), two.stopped)
            for name in ("sampler", "old", "reference"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_other_rewards_after_a_resume_are_reported(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(prompts, tmp_path, max_steps=2, save_steps=1)
    use_rewards(monkeypatch, {"vowels": vowels})
    train(prompts, tmp_path, max_steps=4, resume="auto", save_steps=1)
    assert (
        "the rewards differ from the rewards in the checkpoint"
        in (tmp_path / "run" / "events.jsonl").read_text()
    )


def test_groups_without_spread_are_replaced(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(answer: ScoredAnswer) -> float:
        return vowels(answer) if int(answer.columns["answer"]) % 2 else 1.0

    use_rewards(monkeypatch, {"odd": odd})
    spreads = []
    for rounds in (0, 8):
        recipe, session = open_both(prompts, dynamic_sampling=rounds)
        recipe.make_batches(session, 0, observer=Observers())
        found = recipe.batch_metrics(0)
        spreads.append(recipe._rollouts.scores.std(axis=1)[:, 0])
        assert found["frac_reward_zero_std"] == pytest.approx((spreads[0] == 0).mean())
        chosen = [group[0].prompt for group in recipe._rollouts.groups]
        assert len(set(chosen)) == 4
    assert (spreads[0] == 0).any() and (spreads[1] > 0).all()


def test_equal_prompts_get_different_answers(tmp_path: Path) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text((json.dumps({"prompt": "Say something."}) + "\n") * 8)
    recipe, session = open_both(path)
    recipe.make_batches(session, 0, observer=Observers())
    answers = [tuple(one.tokens) for group in recipe._rollouts.groups for one in group]
    assert len(set(answers)) == len(answers) == 12


def test_the_reward_rises(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rewards(monkeypatch, {"vowels": vowels})
    more = {
        "max_steps": 20,
        "num_generations": 8,
        "lr": 5e-3,
        "train_type": "full",
        "batch_size": 4,
        "lr_scheduler": "constant",
    }
    run = crosstune.train(**options(prompts, tmp_path, skip_eval=False, eval_samples=8, **more))
    rewards = [row["reward"] for row in metrics_of(run.folder)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["eval_after"]["reward"] > summary["eval_before"]["reward"]
    low, high = summary["eval_intervals"]["reward"]
    assert low < summary["eval_after"]["reward"] < high
    assert "--eval_dataset FILE" not in (run.folder / "report.html").read_text(), "it was evaluated"
    [*_, last] = [row for row in read_jsonl(run.folder / "events.jsonl") if row["kind"] == "evaluation"]
    assert len(last["samples"]) == 3 and all(isinstance(sample["score"], float) for sample in last["samples"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_generations": 1}, "num_generations 1 cannot be used"),
        ({"context_length": 12}, "leave no room for an answer of 6 tokens"),
        ({"context_length": 4}, "do not fit into a context of 4 tokens"),
        ({"rl_loss": "reinforce", "num_iterations": 2}, "num_iterations does not work"),
        ({"packing": True}, "packing does not work with recipe rl"),
    ],
)
def test_bad_requests(prompts: Path, tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(prompts, tmp_path, **more)


def test_bad_rows_and_bad_rewards(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.jsonl"
    for row, message in (
        ({"completion": "x"}, "has no prompt"),
        ({"prompt": " "}, "is empty"),
        ({"prompt": 3}, "prompt is 3"),
    ):
        path.write_text(json.dumps({"prompt": "Good."}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(UserError, match=rf"line 2(?s:.*){message}|{message}(?s:.*)line 2"):
            train(path, tmp_path)
    with pytest.raises(UserError, match="No reward has a weight"):
        train(prompts, tmp_path, name="none", reward="json*0")
    use_rewards(monkeypatch, {"vowels": lambda answer: float("nan")})
    rows = train(prompts, tmp_path, name="nan")
    assert all(row["grad_norm"] == 0 and row["rewards/vowels/failed"] == 1 for row in rows)
    assert "reward vowels fails" in json.loads((tmp_path / "nan" / "summary.json").read_text())["verdicts"]


def test_a_plan_rejects_what_training_would(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--recipe", "rl", "--dataset", str(prompts), "--model_name", "tiny-random"]
    missing = f"{tmp_path}/none.py:near"
    assert main([*words, "--backend", "cpu", "--reward", f"{missing},exact:result"]) == 2
    said = capsys.readouterr().err
    assert "There is no file" in said and "the column result, which no row has" in said
    # Another machine may have the file.
    assert main([*words, "--reward", missing, "--machine", "rtx-4090"]) == 0


def test_a_move_is_checked_by_the_prompts(prompts: Path) -> None:
    measured = []
    for backend in ("cpu", "mlx"):
        recipe, session = open_both(prompts, backend=backend)
        measured.append(measure_loss(session, recipe, session.plan, step=1))
    there, here = measured
    assert there.loss > 1 and there.num_supervised == here.num_supervised > 50
    assert compare_losses(there, here).within


@pytest.mark.cuda
def test_on_a_gpu_the_sampler_difference_stays_small(prompts: Path, tmp_path: Path) -> None:
    """The generator and the training pass use the same fast layers in bf16."""
    more = {"backend": "cuda", "precision": "bf16", "kernels": "fast", "max_steps": 50, "num_generations": 8}
    rows = train(prompts, tmp_path, max_new_tokens=64, lr=1e-4, num_epochs=20, **more)
    assert len(rows) == 50
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-2
    again = train(prompts, tmp_path, name="again", max_new_tokens=64, lr=1e-4, num_epochs=20, **more)
    assert [row["reward"] for row in again[:1]] == [row["reward"] for row in rows[:1]]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes in /proc")
@pytest.mark.parametrize("bad", [[], ["exact:nothing"]])
def test_the_processes_of_rewards_end_with_the_run(
    bad: list[str], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosstune.recipes.rl.recipe.open_rewards", open_rewards)
    (tmp_path / "short.py").write_text(
        "def short(completions, **_):\n    return [-len(one) for one in completions]\n"
    )
    asked = options(prompts, tmp_path, max_steps=1, reward=[f"{tmp_path}/short.py:short", "regex:^a", *bad])
    before = _children()
    if bad:  # found when the rewards are open
        with pytest.raises(UserError, match="which no row has"):
            crosstune.train(**asked)
    else:
        crosstune.train(**asked)
    assert _children() == before


def _children() -> set[int]:
    """Return the living children of this process."""
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended
            continue
        if parent == str(os.getpid()) and state != "Z":
            found.add(int(stat.parent.name))
    return found
