"""Train on rewards of generated answers: the batches of a step, evaluation by rewards, and samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Observer, Warned
from crosstune.core.intervals import mean_interval
from crosstune.core.protocols import (
    Array,
    Backward,
    Batch,
    DividesPrompts,
    Evaluation,
    Metrics,
    Sample,
    Session,
    Task,
)
from crosstune.core.rewards import Rewards
from crosstune.core.weights import averaged
from crosstune.data.batches.row_order import RowOrder
from crosstune.data.batches.token_batch import Example, TokenBatch, split_rows
from crosstune.data.prompt_rows import prompt_key
from crosstune.data.read.in_memory import name_in_memory
from crosstune.recipes.rl.losses import Floats, RlLoss, advantages
from crosstune.recipes.rl.read_prompts import Prompt, columns_of, identity_of, read_prompts, tokenize
from crosstune.recipes.rl.rewards.judged import FindJudge
from crosstune.recipes.rl.rewards.open_rewards import check_columns, open_rewards
from crosstune.recipes.rl.rollouts import Generator, Rollout, RolloutBatch, Rollouts, make_batch, measure
from crosstune.recipes.rl.verdicts import Verdicts, mean_name
from crosstune.recipes.sft import TokenRecipe, engine_parts

_REWARDS = "rewards"
"""The hash of the rewards among the carried arrays."""
REFERENCES = ("answer", "solution", "reference", "ground_truth", "target")
"""Columns that are shown next to the answers of an evaluation."""


class RlRecipe(TokenRecipe):
    """The prompts of one run, the answers to them, and their evaluation."""

    truncation_of_report = "drop"  # prompts are never cut

    def __init__(self, config: Config, *, open_judge: FindJudge | None = None, **options: Any) -> None:
        raise_all(check_options(config))
        super().__init__(config, **options)
        self.open_judge, self.loss = open_judge, RlLoss.from_config(config)
        self.weight_name = self.loss.unit
        data = read_prompts(config)
        if config.reward is not None:
            check_columns(config, columns_of(data.train))
        self.data = tokenize(data, self.tokenizer, config=self.config, model_limit=self.model_limit)
        self.train, self.held_out = self.data.train, self.data.held_out
        self._rewards: Rewards | None = None
        self.rollouts: Rollouts | None = None

    def configure(self, config: Config) -> None:
        super().configure(config)
        self.loss = RlLoss.from_config(config)

    def task(self, engine: str) -> Task:
        return engine_parts("rl", engine).RlLM(self.loss)

    def prepare_session(
        self, session: Any, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Open the rewards: a plan or a data report needs none."""
        self.observer = observer  # which also records events
        if self._rewards is not None:
            return
        backend = session.plan.backend.name
        assert self.open_judge is not None, "a recipe that trains can find judges"
        self._rewards = open_rewards(
            self.config, backend=backend, observer=observer, open_judge=self.open_judge
        )

    def close(self) -> None:
        if self._rewards is not None:
            self._rewards.close()

    @property
    def rewards(self) -> Rewards:
        assert self._rewards is not None, "the session was prepared"
        return self._rewards

    def make_batches(self, session: Session, step: int, *, observer: Observer) -> Sequence[Batch]:
        number = step // self.config.num_iterations
        if self.rollouts is None or self.rollouts.number != number:
            self.rollouts = self._generate(session, number)
        return self._scored_batches(self.rollouts)

    def _generate(self, session: Any, number: int) -> Rollouts:
        """Return the answers of a generation, with their log probabilities before the first step on them."""
        config = self.config
        places = self.rows(number * config.num_iterations)
        found = self._generator(session, self.train).generate(places, number=number)
        if config.num_iterations > 1 or self.loss.has_kl_reward:
            found = self._with_log_probs(session, found, "old")
        if self.loss.beta:
            found = self._with_log_probs(session, found, "reference")
        return found

    def _with_log_probs(self, session: Any, rollouts: Rollouts, name: str) -> Rollouts:
        """Return the answers with the log probabilities of their tokens: `old`, in the training pass, or of the `reference`."""
        batches = self._batches(rollouts.groups)
        vectors = session.task.token_log_probs(session, batches, reference=name == "reference")
        flat = np.concatenate(vectors)
        if not np.isfinite(flat).all():
            raise UserError(
                "The log probabilities of the answers are not finite.",
                why="the model overflows in this precision, or has weights that are not finite.",
                do="use --precision fp32 or bf16, or a lower --lr",
            )
        parts: Any = iter(np.split(flat, np.cumsum([len(rollout.tokens) for rollout in rollouts.flat])))
        groups = [[replace(rollout, **{name: next(parts)}) for rollout in group] for group in rollouts.groups]
        return replace(rollouts, groups=groups)

    def _batches(
        self, groups: Sequence[Sequence[Rollout]], given: Floats | None = None
    ) -> list[RolloutBatch]:
        """Return micro-batches of answers, with their advantages if given."""
        starts, size = range(0, len(groups), self.config.batch_size), self.config.batch_size
        return [
            self._batch(
                groups[start : start + size],
                given[start : start + size].reshape(-1).tolist() if given is not None else None,
            )
            for start in starts
        ]

    def _batch(
        self, groups: Sequence[Sequence[Rollout]], given: Sequence[float] | None = None
    ) -> RolloutBatch:
        return make_batch(
            groups,
            [self.train[group[0].prompt].tokens for group in groups],
            loss=self.loss,
            pad_id=self.tokenizer.pad_id,
            advantages=given,
            masks_cut=self.config.mask_truncated,
            shares_prompts=self.config.share_prompts,
        )

    def _scored_batches(self, rollouts: Rollouts) -> list[RolloutBatch]:
        """Return the micro-batches of a step on these answers."""
        rewards = rollouts.rewards(self.rewards.weights)
        if self.loss.has_kl_reward:
            rewards = rewards - self.loss.beta * self._log_ratios(rollouts).reshape(rewards.shape)
        given = advantages(rewards, name=self.loss.name, scale=self.loss.scale)
        batches = self._batches(rollouts.groups, given)
        if not sum(batch.weight for batch in batches):  # every answer is cut and left out
            batches[0] = replace(batches[0], weight=1)
        return batches

    def _log_ratios(self, rollouts: Rollouts) -> Floats:
        """Return the log ratio of each answer to the reference, 0 if it is left out of the loss."""
        given: list[Any] = rollouts.flat
        kept = np.array([one.stopped or not self.config.mask_truncated for one in given])
        return kept * np.array([float((one.old - one.reference).sum()) for one in given])

    def _generator(self, session: Any, prompts: Sequence[Prompt]) -> Generator:
        assert isinstance(session, DividesPrompts), "a session of a language model generates"
        return Generator(
            session=session,
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            config=self.config,
            prompts=prompts,
        )

    def batch_metrics(self, step: int) -> Metrics:
        assert self.rollouts is not None
        found = measure(self.rollouts, self.rewards.names, self.rewards.weights)
        if self.loss.has_kl_reward:
            found["kl"] = float(self._log_ratios(self.rollouts).mean())
        is_new = step % self.config.num_iterations == 0
        return found | {name: seconds if is_new else 0.0 for name, seconds in self.rollouts.seconds.items()}

    def carried_state(self) -> Mapping[str, Array]:
        """Return the hash of the rewards, and the answers if there are further steps on them."""
        state: dict[str, Array] = {}
        if self._rewards is not None:
            state[_REWARDS] = np.frombuffer(self._rewards.identity().encode(), np.uint8)
        if self.rollouts is not None and self.config.num_iterations > 1:
            state |= self.rollouts.to_arrays()
        return state

    def carry_on(self, state: Mapping[str, Array], *, step: int) -> None:
        if _REWARDS in state and bytes(state[_REWARDS]).decode(errors="replace") != self.rewards.identity():
            message = (
                "the rewards differ from the rewards in the checkpoint: the run continues with the new ones"
            )
            self.observer.on_event(Warned(message=message, step=step))
        if "generation" in state and step % self.config.num_iterations:
            found = Rollouts.from_arrays(state)
            fits = found.scores.shape[1:] == (self.config.num_generations, len(self.rewards.names))
            self.rollouts = found if fits and found.number == step // self.config.num_iterations else None

    def micro_batches(self, step: int) -> list[TokenBatch]:
        """Return the prompts of a step as text to predict, to compare a model before and after a move."""
        examples = [
            self.example(place, supervised=np.arange(len(self.train[place].tokens)) > 0)
            for place in self.rows(step)
        ]
        return list(split_rows(examples, batch_size=self.config.batch_size, pad_id=self.tokenizer.pad_id))

    def example(self, place: int, *, supervised: Array | None = None) -> Example:
        """Return a prompt as an example, without supervised tokens unless given."""
        tokens = np.array(self.train[place].tokens, dtype=np.int32)
        marks = supervised if supervised is not None else np.zeros(len(tokens), dtype=np.bool_)
        return Example(tokens=tokens, supervised=marks, index=place)

    def _order(self) -> RowOrder:
        """Return the order of the prompts, a step for each generation."""
        order = RowOrder.from_config(self.config, num_examples=len(self.train))
        steps = self.config.max_steps
        return replace(order, max_steps=-1 if steps == -1 else -(-steps // self.config.num_iterations))

    def num_steps(self) -> int:
        steps = self._order().num_steps() * self.config.num_iterations
        return steps if self.config.max_steps == -1 else min(steps, self.config.max_steps)

    def rows(self, step: int) -> list[int]:
        return super().rows(step // self.config.num_iterations)

    def order(self) -> Mapping[str, Any]:
        names = ("num_generations", "num_iterations")
        return {**super().order(), **{name: getattr(self.config, name) for name in names}}

    def position(self, step: int) -> Mapping[str, Any]:
        following = self.rows(step) if step < self.num_steps() else []
        return self._order().position(-(-step // self.config.num_iterations)) | {"next_examples": following}

    def identity_of(self, part: Sequence[Prompt]) -> str:
        return identity_of(part)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each prompt."""
        return np.array([len(one.tokens) for one in self.train])

    def longest_row(self) -> int:
        """Return the tokens of the longest prompt with all of its answers at their maximum length."""
        return int(self.lengths.max()) + self.longest_target()

    def longest_target(self) -> int:
        return self.config.num_generations * self.config.max_new_tokens

    def tokens_per_row(self) -> float:
        return float(self.lengths.mean()) + self.longest_target()

    def longest_batch(self, size: int) -> RolloutBatch:
        num, count = self.config.num_generations, self.config.max_new_tokens
        zeros = np.zeros(count, dtype=np.float32)
        values: dict[str, Any] = {"old": zeros} if self.config.num_iterations > 1 else {}
        values |= {"reference": zeros} if self.loss.has_kl_term else {}
        made = Rollout(
            prompt=0, tokens=[self.tokenizer.pad_id] * count, sampler=zeros, stopped=True, **values
        )
        return self._batch([[replace(made, prompt=place)] * num for [place] in self.longest_rows(size)])

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        lengths, config, data = self.lengths, self.config, self.data
        num_kept = len(self.train) + len(self.held_out) + data.num_too_long + len(data.skipped)
        columns = sorted(columns_of(self.train[:1000]))
        warnings = []
        if data.num_too_long and not self.stops_at_long:
            warnings.append(f"prompts that leave no room for an answer and are left out: {data.num_too_long}")
        if data.skipped:
            warnings.append(f"{len(data.skipped)} rows cannot be read; --skip_bad_rows leaves them out")
        if not self.held_out and not config.skip_eval and config.eval_samples:
            warnings.append(
                "nothing is evaluated: the data is too small to hold out prompts; pass --eval_dataset"
            )
        described = {
            "dataset": name_in_memory(config.dataset),
            "format": " with ".join(["prompts", *([", ".join(columns)] if columns else [])]),
            "identity": self.identity(),
            "context_length": config.context_length,
            "num_steps": self.num_steps(),
            "train": {
                "examples": len(self.train), "tokens": int(lengths.sum()), "supervised_tokens": 0, "longest": int(lengths.max()),
                "rows": data.num_rows, "bad_rows": len(data.skipped), "dropped_examples": data.num_too_long,
                "duplicates": len(self.train) - len({prompt_key(one) for one in self.train}),
                **{f"length_p{share}": int(np.percentile(lengths, share, method="higher")) for share in (50, 90, 99)},
            },
            "rows": {
                "read": data.num_rows, "trained": len(self.train), "held_out": len(self.held_out), "too_long": data.num_too_long,
                "bad": len(data.skipped), "unused": data.num_rows - num_kept,
            },
            **({"eval": {"examples": len(self.held_out)}} if self.held_out else {}),
            **({"stops_at_long": True} if self.stops_at_long else {}),
        }  # fmt: skip
        return described | {k: v for k, v in (("notes", list(data.notes)), ("warnings", warnings)) if v}

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        """Return the rewards of one answer to each held-out prompt, always with the same random numbers."""
        if not self.held_out:
            return Evaluation(metrics={})
        with averaged(session):
            generator = self._generator(session, self.held_out)
            groups = generator.answer(range(len(self.held_out)), num=1, key="evaluation")
            scores = generator.score(groups)
        found = Rollouts(number=0, groups=groups, scores=scores)
        names = self.rewards.names
        metrics = measure(found, names, self.rewards.weights)
        del metrics["frac_reward_zero_std"]
        rewards = found.rewards(self.rewards.weights)
        scored = {"": rewards, **{name: scores[:, :, place] for place, name in enumerate(names)}}
        known = {name: values[np.isfinite(values)].tolist() for name, values in scored.items()}
        intervals = {
            mean_name(name): interval
            for name, values in known.items()
            if (interval := mean_interval(values)) is not None
        }
        samples = [
            Sample(
                prompt=prompt.text,
                answer=generator.text(group[0]).strip(),
                reference=_reference(prompt),
                score=float(reward[0]) if math.isfinite(reward[0]) else None,
            )
            for prompt, group, reward in zip(self.held_out, groups, rewards, strict=True)
        ]
        return Evaluation(
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            samples=samples[: self.config.num_samples],
            intervals=intervals,
        )

    @cached_property
    def _verdicts(self) -> Verdicts:
        return Verdicts(
            names=self.rewards.names,
            sampler_bound=self.config.sampler_bound,
            max_new_tokens=self.config.max_new_tokens,
            masks_cut=self.config.mask_truncated,
        )

    def judge_step(self, step: int, result: Backward) -> Mapping[str, str]:
        return self._verdicts.observe_step(result.metrics)

    def judge_evaluation(self, evaluations: Mapping[int, Metrics]) -> Mapping[str, str]:
        return self._verdicts.observe_evaluation(evaluations, num=len(self.held_out))


def _reference(prompt: Prompt) -> str:
    return next(
        (str(prompt.columns[name]) for name in REFERENCES if prompt.columns.get(name) is not None), ""
    )


def check_options(config: Config) -> Iterator[UserError]:
    """Yield a problem for each option that the recipe does not support."""
    if config.num_generations < 2:
        yield UserError(
            "--num_generations 1 cannot be used.",
            why="an answer is compared with the other answers to its prompt.",
            do="use 2 or more; 8 is usual",
        )
    if config.rl_loss == "reinforce" and config.num_iterations > 1:
        yield UserError(
            "--num_iterations does not work with --rl_loss reinforce.",
            why="it has no probability ratio, so its second step on the same answers would be wrong.",
            do="use --rl_loss grpo, or one step",
        )
    for name in ("packing", "train_on_prompt"):
        if getattr(config, name):
            why = "its rows are generated answers."
            yield UserError(f"--{name} does not work with --recipe rl.", why=why)
