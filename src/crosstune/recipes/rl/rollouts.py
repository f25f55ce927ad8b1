"""Generate the answers of a step with the current weights, score them, and make micro-batches of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.protocols import Array, DividesPrompts
from crosstune.core.rewards import Rewards, weighted_sum
from crosstune.core.sampling import Sampling
from crosstune.data.batches.forked import Fork, fork_rows, separate_rows
from crosstune.data.batches.token_batch import Example, TokenBatch, number_answers, pad_rows
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.rl.losses import RlLoss, deviation
from crosstune.recipes.rl.read_prompts import Prompt

Floats = NDArray[np.float32]
Scores = NDArray[np.float64]
_PROMPT_KEY = 2**35
"""Separates the random stream of replacing prompts from other streams with the same seed."""
_ANSWERS_PER_PROMPT = 2**20
"""More than the answers to one prompt in a step."""
_OPTIONAL = ("old", "reference")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A generated answer to a prompt."""

    prompt: int
    """The index of the prompt in the data."""
    tokens: Sequence[int]
    """With the stop token, if there is one."""
    sampler: Floats
    """The log probability of each token in the generator."""
    stopped: bool
    """False if the answer was cut at its maximum length."""
    old: Floats | None = None
    """The log probability of each token in the training pass, with the weights of the generator."""
    reference: Floats | None = None
    """The log probability of each token under the reference."""

    def example(self, prompt: Sequence[int]) -> Example:
        """Return the prompt with the answer, whose tokens carry the loss."""
        return Example(
            tokens=np.array([*prompt, *self.tokens], dtype=np.int32),
            supervised=np.arange(len(prompt) + len(self.tokens)) >= len(prompt),
            index=self.prompt,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Answers in the order of their prompts."""

    tokens: TokenBatch
    weight: int
    of_answers: Mapping[str, Floats]
    """`advantages`, and `kept`: 0 for an answer that is left out of the loss."""
    of_tokens: Mapping[str, Floats] = field(default_factory=dict)
    """`sampler`, `old` and `reference`, for the tokens of all answers in their order."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def arrays(self, token_arrays: Callable[[TokenBatch], Mapping[str, Array]]) -> dict[str, Array]:
        """Return the arrays for an engine; `token_arrays` makes the arrays of tokens, `targets` possibly padded."""
        found = dict(token_arrays(self.tokens))
        width = len(found["targets"])
        padded = {name: np.pad(values, (0, width - len(values))) for name, values in self.of_tokens.items()}
        return {**found, **self.of_answers, **padded}


def make_batch(
    groups: Sequence[Sequence[Rollout]],
    prompts: Sequence[Sequence[int]],
    *,
    loss: RlLoss,
    pad_id: int,
    advantages: Sequence[float] | None = None,
    masks_cut: bool = False,
    shares_prompts: bool = True,
) -> RolloutBatch:
    """Make a micro-batch from groups of answers and the tokens of the prompt of each group."""
    rollouts = [rollout for group in groups for rollout in group]
    forks = [
        Fork(tuple(rollout.example(prompt) for rollout in group))
        for group, prompt in zip(groups, prompts, strict=True)
    ]
    if shares_prompts:
        forked = fork_rows([[fork] for fork in forks], pad_id=pad_id)
        tokens: TokenBatch = forked if len(groups[0]) > 1 else separate_rows(forked, pad_id=pad_id)
    else:
        tokens = pad_rows([example for fork in forks for example in fork.examples], pad_id=pad_id)
    assert number_answers(tokens).max(initial=-1) + 1 == len(rollouts), "every answer has tokens"
    kept = [rollout.stopped or not masks_cut for rollout in rollouts]
    num_tokens = sum(len(rollout.tokens) for rollout, is_kept in zip(rollouts, kept, strict=True) if is_kept)
    of_tokens = {
        name: np.concatenate([np.asarray(getattr(rollout, name), dtype=np.float32) for rollout in rollouts])
        for name in ("sampler", "old", "reference")
        if getattr(rollouts[0], name) is not None
    }
    return RolloutBatch(
        tokens=tokens,
        weight=loss.weight(len(rollouts), num_tokens),
        of_answers={
            "advantages": np.array(
                advantages if advantages is not None else np.zeros(len(rollouts)), dtype=np.float32
            ),
            "kept": np.array(kept, dtype=np.float32),
        },
        of_tokens=of_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The answers of one generation, with their scores."""

    number: int
    """The number of the generation, counted from 0."""
    groups: Sequence[Sequence[Rollout]]
    """The answers to each prompt."""
    scores: Scores
    """Prompts x answers x rewards; nan for an answer without a score."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    equal_share: float = 0.0
    """The fraction of the first groups whose answers all have the same reward."""

    @property
    def flat(self) -> list[Rollout]:
        """All answers, in the order of their groups."""
        return [rollout for group in self.groups for rollout in group]

    def rewards(self, weights: Sequence[float]) -> Scores:
        """Return the reward of each answer, a row for each prompt."""
        shape = self.scores.shape
        return weighted_sum(self.scores.reshape(-1, shape[2]), weights).reshape(shape[:2])

    def to_arrays(self) -> dict[str, Array]:
        flat = self.flat
        arrays: dict[str, Array] = {
            "generation": np.array([self.number, self.scores.shape[1]], dtype=np.int64),
            "prompts": np.array([rollout.prompt for rollout in flat], dtype=np.int64),
            "lengths": np.array([len(rollout.tokens) for rollout in flat], dtype=np.int64),
            "stopped": np.array([rollout.stopped for rollout in flat], dtype=np.uint8),
            "tokens": np.concatenate([np.array(rollout.tokens, dtype=np.int32) for rollout in flat]),
            "scores": self.scores,
        }
        for name in ("sampler", *_OPTIONAL):
            values = [getattr(rollout, name) for rollout in flat]
            if values[0] is not None:
                arrays[name] = np.concatenate(values).astype(np.float32)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Rollouts:
        number, size = (int(value) for value in arrays["generation"])
        ends = np.cumsum(arrays["lengths"])[:-1]
        pieces = {
            name: np.split(arrays[name], ends) for name in ("tokens", "sampler", *_OPTIONAL) if name in arrays
        }
        flat = [
            Rollout(
                prompt=int(prompt),
                stopped=bool(stopped),
                tokens=pieces["tokens"][place].tolist(),
                sampler=pieces["sampler"][place],
                **{name: pieces[name][place] for name in _OPTIONAL if name in pieces},
            )
            for place, (prompt, stopped) in enumerate(zip(arrays["prompts"], arrays["stopped"], strict=True))
        ]
        groups = [flat[start : start + size] for start in range(0, len(flat), size)]
        return cls(number=number, groups=groups, scores=np.asarray(arrays["scores"], dtype=np.float64))


@dataclass(kw_only=True)
class Generator:
    """Generates and scores answers to the prompts of a run, with random numbers from its seed."""

    session: DividesPrompts
    tokenizer: Tokenizer
    rewards: Rewards
    config: Config
    prompts: Sequence[Prompt]
    """Training or held-out prompts."""
    generate_s: float = 0.0
    reward_s: float = 0.0

    def answer(self, places: Sequence[int], *, num: int, key: str) -> list[list[Rollout]]:
        """Return `num` answers to each of the prompts at these indices. The processes share the distinct prompts.

        An answer depends on the weights, its prompt, its number among the answers to equal prompts, the seed and `key`.
        """
        started = time.perf_counter()
        asked: dict[tuple[int, ...], list[int]] = {}
        for number, place in enumerate(places):
            asked.setdefault(tuple(self.prompts[place].tokens), []).append(number)
        distinct = list(asked)
        own = self.session.own_prompts(len(distinct))
        keys = [(index, number) for index in own for number in range(num * len(asked[distinct[index]]))]
        answers = self.session.sample(
            [distinct[index] for index, _ in keys],
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=sorted(self.tokenizer.stop_ids),
            sampling=Sampling(temperature=self.config.temperature, seed=self._seed(key)),
        )
        # Token ids are whole numbers in float32.
        vectors: dict[int, Array] = {
            index * _ANSWERS_PER_PROMPT + number: np.array(
                [answer.stopped, *answer.tokens, *answer.log_probs], dtype=np.float32
            )
            for (index, number), answer in zip(keys, answers, strict=True)
        }
        found = iter(self.session.gather_vectors(vectors))
        groups: list[list[Rollout]] = [[] for _ in places]
        for numbers in asked.values():
            for number in numbers:
                groups[number] = [_rollout(places[number], next(found)) for _ in range(num)]
        self.generate_s += time.perf_counter() - started
        return groups

    def score(self, groups: Sequence[Sequence[Rollout]]) -> Scores:
        """Return prompts x answers x rewards, rounded to float32. The processes share the prompts."""
        started = time.perf_counter()
        own = self.session.own_share(len(groups))
        asked = [self.prompts[one.prompt].scored(self.text(one)) for place in own for one in groups[place]]
        shape = (-1, len(groups[0]), len(self.rewards.names))
        scores = np.asarray(self.rewards.score(asked), dtype=np.float32) if asked else np.zeros((0, shape[2]))
        rows = scores.reshape(len(own), shape[1] * shape[2])
        found = self.session.gather_vectors(dict(zip(own, rows, strict=True)))
        self.reward_s += time.perf_counter() - started
        return np.stack(found).reshape(shape).astype(np.float64)

    def text(self, rollout: Rollout) -> str:
        """Return the decoded answer without its stop token."""
        tokens = rollout.tokens[:-1] if rollout.stopped else rollout.tokens
        return self.tokenizer.decode(list(tokens))

    def generate(self, places: Sequence[int], *, number: int) -> Rollouts:
        """Return scored answers to the prompts at these indices. Groups whose answers have equal rewards are replaced by answers
        to other prompts, with --dynamic_sampling."""
        num, replacements = self.config.num_generations, self.config.dynamic_sampling
        groups = self.answer(places, num=num, key=f"step {number}")
        scores = self.score(groups)
        equal = self.without_spread(scores)
        first_share = float(equal.mean())
        waiting: list[int] = []
        if replacements:
            random = np.random.Generator(np.random.Philox(key=(self.config.seed, _PROMPT_KEY + number)))
            taken = set(places)
            order = random.permutation(len(self.prompts)).tolist()
            waiting = [place for place in order if place not in taken]
        for attempt in range(replacements):
            wanted = np.flatnonzero(equal)[: len(waiting)]
            if not len(wanted):
                break
            others, waiting = waiting[: len(wanted)], waiting[len(wanted) :]
            added = self.answer(others, num=num, key=f"step {number} attempt {attempt}")
            for at, group, row in zip(wanted, added, self.score(added), strict=True):
                if not self.without_spread(row[None])[0]:
                    groups[at], scores[at] = group, row
            equal = self.without_spread(scores)
        return Rollouts(
            number=number,
            groups=groups,
            scores=scores,
            seconds={"time/generate_s": self.generate_s, "time/reward_s": self.reward_s},
            equal_share=first_share,
        )

    def without_spread(self, scores: Scores) -> NDArray[np.bool_]:
        """Return True for each group in which all answers have the same reward, or none has one."""
        found = weighted_sum(scores.reshape(-1, scores.shape[2]), self.rewards.weights)
        return np.isclose(deviation(found.reshape(scores.shape[:2])), 0)

    def _seed(self, key: str) -> int:
        digest = hashlib.sha256(f"{self.config.seed} {key}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def _rollout(place: int, vector: Array) -> Rollout:
    count = (len(vector) - 1) // 2
    return Rollout(
        prompt=place,
        stopped=bool(vector[0]),
        tokens=vector[1 : 1 + count].astype(np.int64).tolist(),
        sampler=vector[1 + count :].astype(np.float32),
    )


def measure(rollouts: Rollouts, names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """Return the metrics of answers, under TRL's names."""
    rewards = rollouts.rewards(weights).reshape(1, -1)
    lengths = np.array([len(rollout.tokens) for rollout in rollouts.flat])
    stopped = np.array([rollout.stopped for rollout in rollouts.flat])
    found = {
        "reward": nan_mean(rewards),
        "reward_std": float(deviation(rewards)[0]),
        "frac_reward_zero_std": rollouts.equal_share,
        "completions/unscored_ratio": float(np.isnan(rewards).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/mean_terminated_length": nan_mean(np.where(stopped, lengths, np.nan)),
        "completions/clipped_ratio": float(1 - stopped.mean()),
    }
    for place, name in enumerate(names):
        scores = rollouts.scores[:, :, place].reshape(1, -1)
        found |= {
            f"rewards/{name}/mean": nan_mean(scores),
            f"rewards/{name}/std": float(deviation(scores)[0]),
            f"rewards/{name}/failed": float(np.isnan(scores).mean()),
        }
    return found


def nan_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not nan; nan if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
