"""A reward for the bundled example of reinforcement learning: the right color, in as few words as possible."""

import re

COLORS = {"red", "blue", "green", "yellow", "black", "white", "brown", "orange", "purple", "pink"}


def right(completions, answer, **_):
    """1 for the right color alone, 1/n for an answer of n words that names it and no other color, 0 otherwise."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        words = re.findall(r"\w+", completion.lower())
        scores.append(1 / len(words) if COLORS.intersection(words) == {wanted} else 0.0)
    return scores
