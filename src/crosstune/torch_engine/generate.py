"""Answers for several prompts at once, through transformers' generation."""

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
    """New tokens for each prompt, without the prompt and without the token that ended the answer.

    Greedy when the temperature is 0. Sampling draws from `seed` and leaves the training's random state alone.
    `on_token` hears each new token of a single prompt as it comes. What the model's own generation_config says
    (beams, penalties, sampling) is set aside: an evaluation must measure the model and nothing else.
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
    own, model.generation_config = model.generation_config, settings
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
        model.generation_config = own
    return [_until_stop(row, stop_ids) for row in output[:, width:].tolist()]


class _Streamer:
    """What transformers calls with the prompt first and then with each new token."""

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
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:place]
    return tokens
