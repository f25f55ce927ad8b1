from __future__ import annotations

from crosstune.core.protocols import Backward, Memory
from crosstune.loop.progress import Progress


def add(progress: Progress, *, tokens: int, seconds: float) -> None:
    result = Backward(loss=1.0, grad_norm=1.0, weight=tokens // 2, num_tokens=tokens)
    progress.add(result, step_s=seconds, memory=Memory(used_bytes=1, peak_bytes=2))


def test_the_rate_leaves_out_the_first_step_of_a_process() -> None:
    progress = Progress()
    assert progress.tokens_per_s() is None
    add(progress, tokens=100, seconds=10.0)
    assert progress.tokens_per_s() == 10.0  # the only one there is
    add(progress, tokens=300, seconds=2.0)
    assert progress.tokens_per_s() == 150.0
    add(progress, tokens=100, seconds=2.0)
    assert progress.tokens_per_s() == 100.0
    assert (progress.tokens, progress.weight, progress.seconds) == (500, 250, 14.0)
    assert progress.longest_step_s == 10.0


def test_a_continued_run_warms_up_again() -> None:
    progress = Progress()
    for _ in range(3):
        add(progress, tokens=100, seconds=1.0)
    continued = Progress.from_manifest(progress.to_manifest())
    assert (continued.steps, continued.start_step, continued.tokens, continued.weight) == (3, 3, 300, 150)
    assert continued.tokens_per_s() is None  # the rate belongs to the process that measured it
    add(continued, tokens=100, seconds=50.0)
    add(continued, tokens=200, seconds=1.0)
    assert continued.tokens_per_s() == 200.0


def test_a_skipped_step_counts_as_a_step_without_tokens() -> None:
    progress = Progress()
    progress.add(None, step_s=3.0, memory=Memory(used_bytes=1, peak_bytes=7))
    assert (progress.steps, progress.skipped, progress.tokens, progress.seconds) == (1, 1, 0, 3.0)
    assert progress.peak_memory_bytes == 7 and progress.first_loss is None


def test_what_the_losses_are_a_sum_over_is_carried_under_the_recipes_name() -> None:
    progress = Progress(weight_name="examples")
    add(progress, tokens=100, seconds=1.0)
    assert progress.summary()["examples"] == 50
    assert Progress.from_manifest(progress.to_manifest(), weight_name="examples").weight == 50
