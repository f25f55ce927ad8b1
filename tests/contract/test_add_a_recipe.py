"""Follow docs/internals/add-a-recipe.md: save its file into a copy of the package, run its commands."""

from __future__ import annotations

import signal

import pytest
from pages import Followed, Page, Workshop

pytestmark = pytest.mark.slow

PAGE = Page("add-a-recipe.md")
STRAIGHT = "--recipe curve --train_type full --precision fp32 --batch_size 32 --lr 0.05 --seed 3"
WHOLE = f"train {STRAIGHT} --backend cpu --max_steps 30 --save_steps 10 --skip_eval"

KILLED = """
import os, signal
from crosstune.cli.main import main
from crosstune.files.run_record import RunRecord
plain = RunRecord.on_step
def on_step(self, metrics):
    plain(self, metrics)
    if metrics["step"] == 23: os.kill(os.getpid(), signal.SIGKILL)
RunRecord.on_step = on_step
main({words})
"""
"""A training that is killed between two checkpoints."""


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> str:
    """The name of a run that nothing interrupts."""
    shop.run(f"{WHOLE} --name whole")
    return "whole"


def losses(shop: Workshop, name: str) -> list[tuple[float, float, float]]:
    return [(row["loss"], row["grad_norm"], row["close"]) for row in shop.metrics(name)]


def test_the_commands_of_the_page_train_evaluate_and_continue(shop: Workshop, followed: Followed) -> None:
    assert "generate" not in followed[0]  # it is not a model to talk to
    assert "resumed" in followed[1]
    summary = shop.json("runs/curve/summary.json")
    assert (summary["status"], summary["steps"], summary["examples"]) == ("finished", 180, 180 * 32)
    assert summary["eval_after"]["close"] > 0.8 > 0.2 > summary["eval_before"]["close"]
    rows = shop.metrics("curve")
    assert [row["step"] for row in rows] == list(range(1, 181))
    assert all(row["examples"] == 32 and 0 <= row["close"] <= 1 for row in rows)
    assert (shop.home / "runs" / "curve" / "model" / "model.safetensors").is_file()


def test_the_recipe_continues_on_the_other_engine(shop: Workshop, followed: Followed, whole: str) -> None:
    assert "resumed" in followed[2]
    summary = shop.json("runs/curve-mlx/summary.json")
    assert (summary["engine"], summary["steps"]) == ("mlx", 240)
    shop.run(f"train {STRAIGHT} --backend mlx --name mlx --max_steps 30 --skip_eval")
    for one, other in zip(losses(shop, whole)[:12], losses(shop, "mlx")[:12], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_killed_run_resumes_bit_for_bit(shop: Workshop, whole: str) -> None:
    words = f"{WHOLE} --name killed --resume auto"
    shop.python(KILLED.format(words=words.split()), code=-signal.SIGKILL)
    assert not (shop.home / "runs" / "killed" / "summary.json").exists()
    shop.run(words)
    assert losses(shop, "killed") == losses(shop, whole)
    one, other = (shop.home / "runs" / name / "model" / "model.safetensors" for name in ("killed", whole))
    assert one.read_bytes() == other.read_bytes()


def test_adapters_go_on_its_linear_layers(shop: Workshop) -> None:
    shop.run(f"train {STRAIGHT} --train_type lora --lora_rank 2 --backend cpu --name lora --max_steps 5")
    assert (shop.home / "runs" / "lora" / "adapter" / "adapter_model.safetensors").is_file()


def test_commands_for_language_models_say_that_it_is_none(shop: Workshop, followed: Followed) -> None:
    assert followed[0]
    for words in ("generate runs/curve --prompt hello", "merge runs/curve"):
        assert "did not train a language model" in shop.run(words, code=2)
    out = shop.run("move runs/curve --to mlx --out curve.tar")
    assert "written" in out and "base " not in out


@pytest.mark.parametrize(("command", "train_type"), [("plan", "qlora"), ("train", "llama_pro")])
def test_methods_that_need_a_base_model_are_refused(shop: Workshop, command: str, train_type: str) -> None:
    out = shop.run(f"{command} --recipe curve --train_type {train_type} --backend cpu", code=2)
    assert f"--train_type {train_type} does not work with the curve recipe" in out


@pytest.mark.parametrize("place", ["window", "evaluate"])
def test_an_error_of_the_recipe_loses_no_step(shop: Workshop, place: str) -> None:
    """A recipe that raises in step 5, or in the evaluation after it: what was trained until then is on disk."""
    folder = shop.home / "src" / "crosstune" / "recipes"
    code = (folder / "curve.py").read_text(encoding="utf-8")
    planted = {
        "window": (
            "rows, size = self.rows(step), ",
            "assert step != 5\n        rows, size = self.rows(step), ",
        ),
        "evaluate": (
            "result = session.evaluate(",
            "assert self.num_steps() == 0\n        result = session.evaluate(",
        ),
    }
    old, new = planted[place]
    assert old in code
    (folder / f"bad_{place}.py").write_text(code.replace(old, new), encoding="utf-8")
    evaluated = "--skip_eval" if place == "window" else "--eval_steps 5 --resume auto"
    options = STRAIGHT.replace("curve", f"bad_{place}")
    if place == "evaluate":  # begin without an evaluation, then go on with one that fails
        shop.run(f"train {options} --backend cpu --name bad-{place} --max_steps 4 --save_steps 2 --skip_eval")
    shop.run(
        f"train {options} --backend cpu --name bad-{place} --max_steps 8 --save_steps 2 {evaluated}", code=1
    )
    summary = shop.json(f"runs/bad-{place}/summary.json")
    assert summary["steps"] == 5
    assert summary["checkpoint"].endswith("step-00000005")
    assert not list((shop.home / "runs" / f"bad-{place}" / "checkpoints").glob(".step-*"))
