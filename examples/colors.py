"""A reward for the bundled example of reinforcement learning: a short answer with the right color."""

import re

COLORS = {"red", "blue", "green", "yellow", "black", "white", "brown", "orange", "purple", "pink"}
SHORT = 5
"""Most words of an answer with the full reward."""


def right(completions, answer, **_):
    """1 for a short answer that names the right color and no other, less for a longer one, 0 for a wrong one."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        words = re.findall(r"\w+", completion.lower())
        is_right = COLORS.intersection(words) == {wanted}
        scores.append(float(is_right) if len(words) <= SHORT else is_right / len(words))
    return scores
