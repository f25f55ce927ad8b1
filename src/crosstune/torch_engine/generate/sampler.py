"""Choose the next token of each row on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosstune.core.sampling import Sampling

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
