"""A reward for the bundled example of reinforcement learning: the answer is the sum, and nothing but the sum."""

import re


def right(completions, answer, **_):
    """1 for the bare sum, 0.5 for the sum among other words, 0 otherwise."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = re.findall(r"\d+", text)
        bare = text.strip().rstrip(".") == wanted
        scores.append(1.0 if bare else 0.5 if numbers and numbers[-1] == wanted else 0.0)
    return scores
