"""Preference losses as functions of the log probabilities of answers, and their metrics under TRL's names, for arrays of
torch and MLX.

Formulas: DPO arXiv:2305.18290, IPO 2310.12036, hinge (SLiC, RSO) 2309.06657, robust 2403.00409, APO 2408.06266, NCA 2402.05369,
BCO 2404.04656, SPPO 2405.00675, ORPO 2403.07691, SimPO 2405.14734, CPO 2401.08417, KTO 2402.01306.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from crosstune.config.conditions import KTO, LOSSES, WITHOUT_REFERENCE, parse_losses
from crosstune.config.schema import Config
from crosstune.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PairScores:
    """The log probabilities of answers, summed over their tokens, for a batch of pairs."""

    chosen: Any
    rejected: Any
    ref_chosen: Any
    """By the reference model; zeros for a loss that needs none."""
    ref_rejected: Any
    num_chosen: Any
    """Number of tokens of each chosen answer."""
    num_rejected: Any
    mean_chosen: Any = 1.0
    """Mean of `num_chosen` over the whole optimizer step."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A weighted sum of losses, and their settings."""

    weights: Mapping[str, float]
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    """The target margin of SimPO."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def is_paired(self) -> bool:
        return KTO not in self.weights

    @property
    def needs_reference(self) -> bool:
        return any(name not in WITHOUT_REFERENCE for name in self.weights)

    def __call__(self, scores: PairScores, f: ModuleType) -> Any:
        """Return the loss of each pair. `f`: the `array_functions` of an engine."""
        return sum(weight * PAIR_LOSSES[name](scores, self, f) for name, weight in self.weights.items())


PairLoss = Callable[[PairScores, PreferenceLoss, ModuleType], Any]


def dpo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    return _smoothed(given.beta * _margin(s), given, f)


def robust(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    e, x = given.label_smoothing, given.beta * _margin(s)
    return (e * f.log_sigmoid(-x) - (1 - e) * f.log_sigmoid(x)) / (1 - 2 * e)


def hinge(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    return f.relu(1 - given.beta * _margin(s))


def ipo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    """Per token, as in the paper's experiments, so that beta does not depend on the length of answers."""
    margin = (s.chosen - s.ref_chosen) / s.num_chosen - (s.rejected - s.ref_rejected) / s.num_rejected
    return (margin - 1 / (2 * given.beta)) ** 2


def apo_zero(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    chosen, rejected = _rewards(s, given)
    return 1 - _sigmoid(chosen, f) + _sigmoid(rejected, f)


def apo_down(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    chosen, rejected = _rewards(s, given)
    return _sigmoid(chosen, f) + 1 - _sigmoid(chosen - rejected, f)


def nca(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    chosen, rejected = _rewards(s, given)
    return -f.log_sigmoid(chosen) - 0.5 * f.log_sigmoid(-chosen) - 0.5 * f.log_sigmoid(-rejected)


def bco(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    """Without the moving mean of the rewards, as in TRL since 1.0: a step depends on its own pairs only."""
    chosen, rejected = _rewards(s, given)
    return -f.log_sigmoid(chosen) - f.log_sigmoid(-rejected)


def sppo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    half = 0.5 / given.beta
    return (s.chosen - s.ref_chosen - half) ** 2 + (s.rejected - s.ref_rejected + half) ** 2


def orpo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    """The odds ratio of mean log probabilities; the log likelihood of the chosen answer is the term `sft`."""
    chosen, rejected = s.chosen / s.num_chosen, s.rejected / s.num_rejected
    odds = chosen - rejected - f.log1mexp(chosen) + f.log1mexp(rejected)
    return -given.beta * f.log_sigmoid(odds)


def simpo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    margin = s.chosen / s.num_chosen - s.rejected / s.num_rejected
    return _smoothed(given.beta * margin - given.gamma, given, f)


def cpo(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    return _smoothed(given.beta * (s.chosen - s.rejected), given, f)


def sft(s: PairScores, given: PreferenceLoss, f: ModuleType) -> Any:
    """The cross entropy of the chosen answers. Its mean over the pairs of a step is the mean over their tokens."""
    return -s.chosen / s.mean_chosen


def kto(ratio: Any, is_desirable: Any, kl: Any, given: PreferenceLoss, f: ModuleType) -> Any:
    """Return the loss of unpaired answers from their log ratios to the reference and the KL estimate of the batch.

    `is_desirable` is 1 or 0.
    """
    sign = 2 * is_desirable - 1
    weight = is_desirable * given.desirable_weight + (1 - is_desirable) * given.undesirable_weight
    return weight * (1 - _sigmoid(sign * given.beta * (ratio - kl), f))


def _smoothed(x: Any, given: PreferenceLoss, f: ModuleType) -> Any:
    e = given.label_smoothing
    return -f.log_sigmoid(x) if not e else -(1 - e) * f.log_sigmoid(x) - e * f.log_sigmoid(-x)


def _margin(s: PairScores) -> Any:
    return (s.chosen - s.ref_chosen) - (s.rejected - s.ref_rejected)


def _rewards(s: PairScores, given: PreferenceLoss) -> tuple[Any, Any]:
    return given.beta * (s.chosen - s.ref_chosen), given.beta * (s.rejected - s.ref_rejected)


def _sigmoid(x: Any, f: ModuleType) -> Any:
    return f.exp(f.log_sigmoid(x))


PAIR_LOSSES: Mapping[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        dpo, ipo, hinge, robust, apo_zero, apo_down, nca, bco, sppo, orpo, simpo, cpo, sft
    )
}  # fmt: skip
assert {*PAIR_LOSSES, KTO} == set(LOSSES)
WITH_SFT = {"orpo": 1.0, "cpo": 1.0}
"""Losses that include the cross entropy of the chosen answers -> its default weight."""
BETAS = {"simpo": 2.0}
"""Default beta by loss; 0.1 for the others."""


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
    f: ModuleType,
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
        losses = kto(log_probs - reference, labels, kl, loss, f)
        return losses.sum(), _measure_singles(log_probs, loss.beta * (log_probs - reference), labels) | {
            "entropy": entropy,
            "kl": (kl * len(labels), len(labels)),
        }
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
    sums = _measure_pairs(scores, loss) | {"entropy": entropy}
    return loss(scores, f).sum(), {name: sums[name] for name in metric_names(loss)}


def _measure_pairs(scores: PairScores, loss: PreferenceLoss) -> Sums:
    chosen, rejected = scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected
    beta, count = loss.beta, len(chosen)
    good, bad = chosen, rejected
    if set(loss.weights) <= {"orpo", "simpo", "sft"}:  # these compare means over tokens, and so does TRL
        good, bad = chosen / scores.num_chosen, rejected / scores.num_rejected
    totals = {
        "rewards/chosen": beta * good.sum(),
        "rewards/rejected": beta * bad.sum(),
        "rewards/margins": beta * (good - bad).sum(),
        ACCURACY: (good > bad).sum(),
        "logps/chosen": scores.chosen.sum(),
        "logps/rejected": scores.rejected.sum(),
        "length/chosen": scores.num_chosen.sum(),
        "length/rejected": scores.num_rejected.sum(),
    }
    return {name: (total, count) for name, total in totals.items()} | {
        "sft_loss": (-scores.chosen.sum(), scores.num_chosen.sum()),
        "kl": ((chosen + rejected).sum(), 2 * count),
    }


def _measure_singles(log_probs: Any, rewards: Any, labels: Any) -> Sums:
    """Return the sums for single answers: those with label 1 count as chosen, the others as rejected."""
    found: Sums = {}
    for side, marks in (("chosen", labels), ("rejected", 1 - labels)):
        count = marks.sum()
        found[f"rewards/{side}"] = ((rewards * marks).sum(), count)
        found[f"logps/{side}"] = ((log_probs * marks).sum(), count)
    right = ((rewards > 0) * labels) + ((rewards < 0) * (1 - labels))
    return found | {ACCURACY: (right.sum(), len(labels))}


def make_loss(config: Config) -> PreferenceLoss:
    """Return the loss of the options."""
    weights = parse_losses(config.preference_loss)
    kinds = [name for name in weights if name != "sft"]
    sft = config.sft_weight
    if sft is None:
        sft = sum(weights[name] * WITH_SFT.get(name, 0.0) for name in kinds)
    if sft and "sft" not in weights:
        weights["sft"] = sft
    default_beta = BETAS.get(kinds[0], 0.1) if len(kinds) == 1 else 0.1
    return PreferenceLoss(
        weights=weights,
        beta=config.beta if config.beta is not None else default_beta,
        label_smoothing=config.label_smoothing,
        gamma=config.simpo_gamma,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )


def check_options(config: Config) -> Iterator[UserError]:
    """Yield a problem for each option that the recipe does not support."""
    loss = make_loss(config)
    if not loss.beta >= 1e-6:
        yield UserError(
            f"--beta {config.beta} is too low for --recipe preference.",
            why="the loss would not depend on the preferences.",
            do="use 0.1, or leave it unset",
        )
    if config.packing and not loss.is_paired:
        yield UserError(
            "--packing cannot be combined with --preference_loss kto.",
            why="its KL estimate uses the answers of the other rows of a micro-batch.",
            do="remove --packing",
        )
    if config.sft_weight is not None and "sft" in parse_losses(config.preference_loss):
        yield UserError(
            f"--sft_weight cannot be combined with --preference_loss {config.preference_loss}.",
            why="the list has the weight of sft.",
            do="remove one of the two",
        )
    if config.train_on_prompt:
        yield UserError(
            "--train_on_prompt does not work with --recipe preference.",
            why="answers are compared, not prompts.",
        )
    if not loss.is_paired and config.batch_size == 1:
        yield UserError(
            "--preference_loss kto needs a --batch_size of at least 2.",
            why="its KL estimate uses the answers of the other rows of a micro-batch.",
        )
