"""The training loop: the only one, for every recipe and every engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.protocols import Observer, Recipe, Session
from crosstune.core.schedule import learning_rate, warmup_steps
from crosstune.loop.stop import StopRequested, StopSignal


@dataclass
class Progress:
    """What a run has done so far; whole at any moment, so that a failure can report it."""

    status: str = "failed"
    steps: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    peak_memory_bytes: int = 0
    step_times_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    eval_before: Mapping[str, float] = field(default_factory=dict)
    eval_after: Mapping[str, float] = field(default_factory=dict)

    def tokens_per_s(self) -> float | None:
        """Over all steps but the first, which pays for warming up; over the first when it is the only one."""
        start = 1 if len(self.step_times_s) > 1 else 0
        seconds = sum(self.step_times_s[start:])
        return sum(self.step_tokens[start:]) / seconds if seconds else None

    def summary(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "steps": self.steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "first_loss": self.first_loss,
            "final_loss": self.final_loss,
            "eval_loss": self.eval_after.get("loss"),
            "eval_before": dict(self.eval_before),
            "eval_after": dict(self.eval_after),
            "tokens_per_s": self.tokens_per_s(),
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def train(
    session: Session,
    recipe: Recipe,
    *,
    config: Config,
    observer: Observer,
    stop: StopSignal,
    progress: Progress,
) -> None:
    """Run every step of a recipe on a session. `progress` is kept up to date throughout."""
    num_steps = recipe.num_steps()
    warmup = warmup_steps(
        schedule=config.lr_scheduler,
        num_steps=num_steps,
        steps=config.warmup_steps,
        ratio=config.warmup_ratio,
    )
    try:
        progress.eval_before = _evaluate(session, recipe, config, observer, stop, step=0, when="before")
        observer.on_event("training", {"num_steps": num_steps})
        for step in range(num_steps):
            if stop.requested:
                raise StopRequested(stop.reason)
            lr = learning_rate(
                step,
                peak=config.lr,
                schedule=config.lr_scheduler,
                num_steps=num_steps,
                warmup=warmup,
                floor_ratio=config.cosine_min_lr_ratio,
            )
            _take_step(session, recipe, step=step, lr=lr, observer=observer, progress=progress)
            done = step + 1
            if config.eval_steps and done % config.eval_steps == 0 and done < num_steps:
                _evaluate(session, recipe, config, observer, stop, step=done, when="during")
        progress.eval_after = _evaluate(session, recipe, config, observer, stop, step=num_steps, when="after")
        progress.status = "finished"
    except StopRequested:
        progress.status = "stopped"
        observer.on_event("stopped", {"reason": stop.reason, "step": progress.steps, "num_steps": num_steps})


def _take_step(
    session: Session, recipe: Recipe, *, step: int, lr: float, observer: Observer, progress: Progress
) -> None:
    window = recipe.window(step)
    started = time.perf_counter()
    result = session.step(window, lr=lr)
    step_s = time.perf_counter() - started
    memory = session.memory()
    progress.steps = step + 1
    progress.tokens += result.num_tokens
    progress.supervised_tokens += result.num_supervised
    progress.first_loss = result.loss if progress.first_loss is None else progress.first_loss
    progress.final_loss = result.loss
    progress.peak_memory_bytes = max(progress.peak_memory_bytes, memory.peak_bytes)
    progress.step_times_s.append(step_s)
    progress.step_tokens.append(result.num_tokens)
    observer.on_step(
        {
            "step": step + 1,
            "loss": result.loss,
            "tokens": result.num_tokens,
            "supervised_tokens": result.num_supervised,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_s": step_s,
            "tokens_per_s": result.num_tokens / step_s,
            "memory_bytes": memory.used_bytes,
        }
    )


def _evaluate(
    session: Session,
    recipe: Recipe,
    config: Config,
    observer: Observer,
    stop: StopSignal,
    *,
    step: int,
    when: str,
) -> Mapping[str, float]:
    if config.skip_eval:
        return {}
    started = time.perf_counter()
    observer.on_event("evaluation_start", {"step": step, "when": when})
    with stop.droppable():
        evaluation = recipe.evaluate(session, observer=observer)
    if not evaluation.metrics:
        return {}
    observer.on_event(
        "evaluation",
        {
            "step": step,
            "when": when,
            "metrics": dict(evaluation.metrics),
            "samples": [vars(sample) for sample in evaluation.samples],
            "seconds": time.perf_counter() - started,
        },
    )
    return evaluation.metrics
