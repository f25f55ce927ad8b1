"""The loss of a batch of answers and its metrics, under TRL's names, for arrays of torch and MLX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.recipes.preference.losses import Functions, PairScores, PreferenceLoss, kto

ACCURACY = "rewards/accuracies"
ANSWER_LENGTH = "completions/mean_length"
"""Mean number of tokens of the generated answers to held-out prompts."""
_BOTH = (
    "rewards/chosen",
    "rewards/rejected",
    ACCURACY,
    "logps/chosen",
    "logps/rejected",
    "entropy",
)
_PAIRS = ("rewards/margins", "length/chosen", "length/rejected", "sft_loss")


def metric_names(loss: PreferenceLoss) -> tuple[str, ...]:
    """Return the names of the metrics. `sft_loss`: cross entropy of the chosen answers per token; `kl`: an estimate of the
    divergence from the reference."""
    return (*_BOTH, *(_PAIRS if loss.is_paired else ()), *(("kl",) if loss.needs_reference else ()))


Sums = dict[str, tuple[Any, Any]]


def loss_and_metrics(
    loss: PreferenceLoss,
    f: Functions,
    arrays: Mapping[str, Any],
    *,
    log_probs: Any,
    reference: Any,
    entropy: tuple[Any, Any],
    kl: Any = None,
) -> tuple[Any, Sums]:
    """Return the loss, summed over the pairs or single answers of a batch, and the sums of its metrics. `kl`: see `kto`."""
    if not loss.is_paired:
        labels = arrays["labels"]
        losses = kto(log_probs - reference, labels, kl, loss.settings, f)
        return losses.sum(), measure_singles(
            log_probs, reference, labels, kl, entropy, beta=loss.settings.beta
        )
    lengths = arrays["lengths"]
    scores = PairScores(
        chosen=log_probs[::2],
        rejected=log_probs[1::2],
        ref_chosen=reference[::2],
        ref_rejected=reference[1::2],
        num_chosen=lengths[::2],
        num_rejected=lengths[1::2],
        mean_chosen=arrays["mean_chosen"],
    )
    return loss(scores, f).sum(), measure_pairs(scores, entropy, loss)


def measure_pairs(scores: PairScores, entropy: tuple[Any, Any], loss: PreferenceLoss) -> Sums:
    """Return the sums of the metrics of pairs."""
    chosen, rejected = scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected
    beta, count = loss.settings.beta, len(chosen)
    good, bad = chosen, rejected
    if set(loss.weights) <= {"orpo", "simpo", "sft"}:  # these compare means over tokens, and so does TRL
        good, bad = chosen / scores.num_chosen, rejected / scores.num_rejected
    sums = {
        "rewards/chosen": (beta * good.sum(), count),
        "rewards/rejected": (beta * bad.sum(), count),
        "rewards/margins": (beta * (good - bad).sum(), count),
        ACCURACY: ((good > bad).sum(), count),
        "logps/chosen": (scores.chosen.sum(), count),
        "logps/rejected": (scores.rejected.sum(), count),
        "length/chosen": (scores.num_chosen.sum(), count),
        "length/rejected": (scores.num_rejected.sum(), count),
        "sft_loss": (-scores.chosen.sum(), scores.num_chosen.sum()),
        "entropy": entropy,
        "kl": ((chosen + rejected).sum(), 2 * count),
    }
    return {name: sums[name] for name in metric_names(loss)}


def measure_singles(
    log_probs: Any, reference: Any, labels: Any, kl: Any, entropy: tuple[Any, Any], *, beta: float
) -> Sums:
    """Return the sums of the metrics of single answers: those with label 1 count as chosen, the others as rejected."""
    rewards = beta * (log_probs - reference)
    good, bad = labels, 1 - labels
    num_good, num_bad = good.sum(), bad.sum()
    return {
        "rewards/chosen": ((rewards * good).sum(), num_good),
        "rewards/rejected": ((rewards * bad).sum(), num_bad),
        "logps/chosen": ((log_probs * good).sum(), num_good),
        "logps/rejected": ((log_probs * bad).sum(), num_bad),
        ACCURACY: ((((rewards > 0) * good) + ((rewards < 0) * bad)).sum(), len(labels)),
        "entropy": entropy,
        "kl": (kl * len(labels), len(labels)),
    }
