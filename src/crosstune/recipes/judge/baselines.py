"""Judge without reading: the verdicts of a constant and of the length of the answer, which a judge has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crosstune.recipes.judge.items import WINNERS, Item
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.scale import Scale

CONSTANT, LONGER, UNTRAINED = "constant", "longer answer", "untrained model"


def baseline_verdicts(
    items: Sequence[Item], *, scale: Scale, train: Sequence[Item] = ()
) -> dict[str, list[Judgement]]:
    """Return the verdicts of judges that know nothing: a constant, and the length of the answer.

    They are fitted on the training items, or without those on the items themselves, which favours them.
    """
    known = [item for item in train if item.is_labelled] or list(items)
    return {CONSTANT: _constant(items, known), LONGER: _longer(items, known, scale)}


def _constant(items: Sequence[Item], known: Sequence[Item]) -> list[Judgement]:
    """Always say the mean score, or the most frequent winner."""
    if items[0].is_pair:
        winners = [item.winner for item in known]
        most = max(WINNERS, key=winners.count)
        return [Judgement(winner=most)] * len(items)
    mean = float(np.mean([item.score for item in known if item.score is not None]))
    return [Judgement(score=mean)] * len(items)


def _longer(items: Sequence[Item], known: Sequence[Item], scale: Scale) -> list[Judgement]:
    """Prefer the longer answer; for scores, the line that fits the length of the answers best."""
    if items[0].is_pair:
        return [Judgement(winner=_longer_of(item.answers)) for item in items]
    lengths = np.array([len(item.answers[0]) for item in known], dtype=np.float64)
    scores = np.array([item.score for item in known], dtype=np.float64)
    spread = float(((lengths - lengths.mean()) ** 2).sum())
    slope = float(((lengths - lengths.mean()) * (scores - scores.mean())).sum()) / spread if spread else 0.0
    guesses = [scores.mean() + slope * (len(item.answers[0]) - lengths.mean()) for item in items]
    return [Judgement(score=float(np.clip(guess, scale.low, scale.high))) for guess in guesses]


def _longer_of(answers: Sequence[str]) -> str:
    first, second = map(len, answers)
    return "tie" if first == second else "A" if first > second else "B"
