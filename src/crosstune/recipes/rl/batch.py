"""A micro-batch of generated answers, each prompt once, with the values of its tokens and answers that the loss reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crosstune.core.protocols import Array
from crosstune.data.batches.forked import Fork, fork_rows, separate_rows
from crosstune.data.batches.token_batch import Example, TokenBatch, number_answers, pad_rows
from crosstune.recipes.rl.losses import RlLoss

Floats = NDArray[np.float32]


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
