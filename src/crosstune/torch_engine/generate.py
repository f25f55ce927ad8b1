"""Answers for several prompts at once, through transformers' generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

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
    `on_token` hears each new token of a single prompt as it comes.
    """
    width = max(len(prompt) for prompt in prompts)
    pad = stop_ids[0] if stop_ids else 0
    input_ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.inference_mode(), torch.random.fork_rng(devices=cuda_devices):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=list(stop_ids) or None,
            use_cache=True,
            streamer=_Streamer(on_token) if on_token is not None else None,
            **sampling,
        )
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
