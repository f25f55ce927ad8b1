"""Generate answers for a batch of prompts with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, cast

import torch
from torch import nn

from crosstune.core.sampling import Sampling
from crosstune.torch_engine.device import Precision
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.sharding.local_shard import free_gathered, sharded_modules, without_gradients

OnToken = Callable[[int], None]


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the new tokens for each prompt, without the prompt and the stop token.

    Sampling uses its own seed and does not change the random state of the training. `on_token` is called with each new
    token of a single prompt. The model's generation_config is ignored, so that an evaluation measures the model alone.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    width = max(len(prompt) for prompt in prompts)
    pad = stop_ids[0] if stop_ids else 0
    input_ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    drawing: dict[str, Any] = {
        "do_sample": False,
        "top_k": 0,
    }  # transformers rejects filters for greedy decoding
    if sampling.temperature:
        drawing = {"do_sample": True, "temperature": sampling.temperature, "min_p": sampling.min_p or None}
        drawing |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        **drawing,
        pad_token_id=pad,
        eos_token_id=list(stop_ids) or None,
        use_cache=True,
    )
    saved, model.generation_config = model.generation_config, settings
    forked: dict[str, Any] = {"devices": []}
    if device.type != "cpu":
        forked = {"devices": [device.index or 0], "device_type": device.type}
    penalties: list[RepetitionPenalty] = []
    if sampling.repetition_penalty != 1:
        penalties = [RepetitionPenalty(sampling.repetition_penalty, mask.to(device))]
    try:
        with without_gradients(model), torch.random.fork_rng(**forked):
            torch.manual_seed(sampling.seed)
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=LogitsProcessorList(penalties),
                streamer=_Streamer(on_token) if on_token is not None else None,
                # All ranks of a sharded model must run the same passes, even if rounding ends an answer earlier on one.
                synced_gpus=bool(sharded_modules(model)),
            )
    finally:
        model.generation_config = saved
        free_gathered(model)
    return [list(takewhile(lambda token: token not in stop_ids, new)) for new in output[:, width:].tolist()]


class RepetitionPenalty:
    """Make earlier tokens less likely. transformers' own processor also counts the padding of prompts, so that an answer
    would depend on the other prompts of the batch."""

    def __init__(self, penalty: float, mask: torch.Tensor) -> None:
        self.penalty, self.mask = penalty, mask

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        real = torch.ones_like(input_ids)
        real[:, : self.mask.shape[1]] = self.mask
        seen = torch.zeros(scores.shape, dtype=real.dtype, device=scores.device)
        seen = seen.scatter_reduce(1, input_ids, real, reduce="amax").bool()
        lowered = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return cast(torch.FloatTensor, torch.where(seen, lowered, scores))


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


@contextlib.contextmanager
def cast_once(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Cast adapters and head to the compute dtype once, for all passes in the `with` block. Weights must not change there."""
    dtype = precision.autocast or precision.weights
    adapters = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    # Autocast would cast a frozen head in each pass, such as one tied to the embeddings.
    casts_head = precision.autocast is not None and type(head) is nn.Linear and not head.weight.requires_grad
    full = head.weight if casts_head else None
    try:
        with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
            for adapter in adapters:
                adapter.held = adapter.factors(dtype)
            if full is not None:
                head.weight = nn.Parameter(full.to(dtype), requires_grad=False)
        yield
    finally:
        for adapter in adapters:
            adapter.held = None
        if full is not None:
            head.weight = full
