"""Generate answers for a batch of prompts with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig

OnToken = Callable[[int], None]


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float,
    seed: int,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the new tokens for each prompt, without the prompt and the stop token.

    Decoding is greedy at temperature 0. Sampling uses `seed` and does not change the random state of the training.
    `on_token` is called with each new token of a single prompt. The model's generation_config (beams, penalties,
    sampling) is ignored, so that an evaluation measures the model alone.
    """
    width = max(len(prompt) for prompt in prompts)
    pad = stop_ids[0] if stop_ids else 0
    input_ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else 1.0,
        top_k=0,
        pad_token_id=pad,
        eos_token_id=list(stop_ids) or None,
        use_cache=True,
    )
    saved, model.generation_config = model.generation_config, settings
    forked = (
        {"devices": [device.index or 0], "device_type": device.type}
        if device.type != "cpu"
        else {"devices": []}
    )
    try:
        with torch.inference_mode(), torch.random.fork_rng(**forked):
            torch.manual_seed(seed)
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                streamer=_Streamer(on_token) if on_token is not None else None,
            )
    finally:
        model.generation_config = saved
    return [_until_stop(row, stop_ids) for row in output[:, width:].tolist()]


class _Streamer:
    """Streamer for transformers, which calls `put` with the prompt first and then with each new token."""

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


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:index]
    return tokens
