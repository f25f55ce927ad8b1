"""Generate with models that have recurrent states or custom caches: transformers' generate, with our choice of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from crosstune.core.answers import Answer, Earlier, OnAnswer, OnToken, Question, group_equal
from crosstune.core.sampling import Sampling
from crosstune.torch_engine.generate.sampler import Sampler, mark_seen, pad_columns
from crosstune.torch_engine.sharding.local_shard import sharded_modules

MOST_ROWS = 16
"""Rows per batch, fixed because the memory of these models is not planned."""


def sample_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    earlier: Earlier | None = None,
    on_token: OnToken | None,
    on_answer: OnAnswer | None,
    numbers: Sequence[int] | None = None,
    inputs_of: Callable[[Sequence[int]], Mapping[str, torch.Tensor]] | None = None,
) -> list[Answer]:
    """Return an answer to each prompt, batch by batch. `inputs_of` returns further inputs for the prompts at these places; then
    `numbers` counts the equal prompts before each."""
    from transformers import GenerationConfig, LogitsProcessorList

    asked = (
        [(place, numbers[place], Question(tuple(prompt), [place])) for place, prompt in enumerate(prompts)]
        if numbers is not None
        else [
            (place, number, question)
            for question in group_equal(prompts, earlier)
            for number, place in enumerate(question.places)
        ]
    )
    answers: dict[int, Answer] = {}
    for first in range(0, len(asked), MOST_ROWS):
        batch = asked[first : first + MOST_ROWS]
        ids = pad_columns([question.prompt for _, _, question in batch], on_left=True)
        starts = torch.tensor([[ids.shape[1] - len(question.prompt)] for _, _, question in batch])
        chosen = _ChosenTokens(batch, sampling, count=max_new_tokens, device=device)
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=stop_ids[0] if stop_ids else 0,
            eos_token_id=list(stop_ids) or None,
            use_cache=True,
        )
        more = inputs_of([place for place, _, _ in batch]) if inputs_of is not None else {}
        saved, model.generation_config = model.generation_config, settings
        try:
            model.generate(
                input_ids=ids.to(device),
                attention_mask=(torch.arange(ids.shape[1]) >= starts).long().to(device),
                **{name: tensor.to(device) for name, tensor in more.items()},
                logits_processor=LogitsProcessorList([chosen]),
                streamer=_Streamer(on_token) if on_token is not None else None,
                # All ranks of a sharded model must run the same passes, even if rounding ends an answer earlier on one.
                synced_gpus=bool(sharded_modules(model)),
            )
        finally:
            model.generation_config = saved
        tokens = torch.stack(chosen.tokens, dim=1).tolist()
        log_probs = torch.stack(chosen.log_probs, dim=1).tolist()
        for (place, _, _), own, values in zip(batch, tokens, log_probs, strict=True):
            ends = [count for count, token in enumerate(own, start=1) if token in stop_ids]
            stop = min(ends, default=len(own))
            answers[place] = Answer(tokens=own[:stop], log_probs=values[:stop], stopped=bool(ends))
            if on_answer is not None:
                on_answer(answers[place])
    return [answers[place] for place in range(len(prompts))]


class _ChosenTokens:
    """A logits processor that chooses and records the tokens, and excludes all others."""

    def __init__(
        self, batch: Sequence[tuple[int, int, Question]], sampling: Sampling, *, count: int, device: Any
    ) -> None:
        self.sampler, self.device = Sampler(sampling, device), device
        self.prompts = [question.prompt for _, _, question in batch]
        self.seen: torch.Tensor | None = None
        numbers = [question.draws(sampling, number, count) for _, number, question in batch]
        self.numbers = torch.stack([torch.from_numpy(row) for row in numbers], dim=1)
        self.tokens: list[torch.Tensor] = []
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.sampler.has_penalty and self.seen is None:
            self.seen = mark_seen(self.prompts, scores.shape[-1], self.device)
        numbers = self.numbers[len(self.tokens)].to(self.device, self.sampler.wide)
        tokens, log_probs = self.sampler.choose(scores, numbers, self.seen)
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0)


class _Streamer:
    """A streamer for transformers: `put` is called with the prompt first, then with each new token."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token = on_token
        self.seen_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self.seen_prompt:
            for token in tokens.flatten().tolist():
                self.on_token(token)
        self.seen_prompt = True

    def end(self) -> None:
        pass
