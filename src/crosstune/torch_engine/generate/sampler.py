"""Choose the next tokens of rows, pad prompts, and divide them into packs that are computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from crosstune.core.sampling import Sampling

Block = list[tuple[torch.Tensor, torch.Tensor]]
"""The keys and values of a prompt in every layer."""
PACK_ON_GPU, PACK_ON_CPU = 8192, 2048
"""Tokens of prompts computed at once, with their padding."""


def split_packs(prompts: Sequence[Sequence[int]], device: torch.device) -> Iterator[slice]:
    """Yield runs of prompts, given longest first, that are computed at once."""
    most, start = PACK_ON_CPU if device.type == "cpu" else PACK_ON_GPU, 0
    while start < len(prompts):
        count = max(1, most // len(prompts[start]))
        yield slice(start, start + count)
        start += count


def pad_columns(prompts: Sequence[Sequence[int]], *, on_left: bool) -> torch.Tensor:
    """Return prompts as rows of equal length."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if on_left else 0
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
    return ids


_NEVER = float("-inf")


class Sampler:
    """Apply the settings of sampling, and choose tokens with one uniform number per row.

    Rows are independent, and nothing waits for the device, so that a CUDA graph can capture it.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.has_penalty = sampling.repetition_penalty != 1
        # Sums over a large vocabulary need more than the 24 bits of fp32, which is the widest dtype of MPS.
        is_narrow = device.type == "mps" or sampling.temperature == 0
        self.wide = torch.float32 if is_narrow else torch.float64

    def choose(
        self, logits: torch.Tensor, numbers: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token for each row of logits, and its log probability before filters and penalties. `seen` marks the
        tokens under the repetition penalty, and the new tokens are added to it."""
        logits, temperature = logits.float(), self.sampling.temperature
        allowed = logits if seen is None else penalize(logits, seen, self.sampling.repetition_penalty)
        if temperature > 0:
            logits = logits / temperature
            allowed = logits if seen is None else allowed / temperature
            sums = filter_logits(allowed, self.sampling).softmax(-1).to(self.wide).cumsum(-1)
            wanted = numbers.to(self.wide)[:, None] * sums[:, -1:]
            tokens = torch.searchsorted(sums, wanted, right=True).clamp_(max=logits.shape[-1] - 1)
        else:
            tokens = allowed.argmax(-1, keepdim=True)
        if seen is not None:
            seen.scatter_(1, tokens, True)
        log_probs = logits.gather(1, tokens)[:, 0] - logits.logsumexp(-1)
        return tokens[:, 0], log_probs


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make the tokens marked in `seen` less likely."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set the logits of excluded tokens to minus infinity, as transformers does."""
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, _NEVER)
    if sampling.top_p < 1:
        ascending, order = logits.sort(-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        dropped[:, -1:] = False
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), _NEVER)
    if sampling.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), _NEVER)
    return logits


def mark_seen(prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return the tokens that occur in each prompt, as prompts x vocabulary."""
    marks = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        marks[row, list(prompt)] = True
    return marks.to(device)
