"""Options of the run folder: what is kept, continued, evaluated and printed."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import EVALUATION, RESUMING, SAVING, WANDB
from crosstune.config.option import OnResume, option
from crosstune.config.unbuilt import WANDB_LOG

MISMATCHES = ("model", "data", "order", "quantization", "trainable", "optimizer", "loss")
"""What `allow_mismatch` may name."""


def mismatches(words: str) -> list[str]:
    """Return the parts of `allow_mismatch`."""
    return [word.strip() for word in words.split(",") if word.strip()]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output_dir: str = option("runs", "Folder that holds run folders", on_resume=OnResume.FREE)
    name: str | None = option(
        None, "Name of the run folder; unset, the time and the model", on_resume=OnResume.FREE
    )
    overwrite: bool = option(
        False, "Move a run that has this name aside, instead of refusing", on_resume=OnResume.ONE_START
    )
    save_model: bool = option(True, "Write the trained adapter or model at the end", on_resume=OnResume.FREE)
    save_steps: int = option(
        0, "Write a checkpoint every so many steps; 0 for none", low=0, on_resume=OnResume.FREE
    )
    save_minutes: float = option(
        10, "Write a checkpoint when the last one is this old; 0 for never", low=0, on_resume=OnResume.FREE
    )
    keep_last_n: int = option(
        3, "Newest checkpoints to keep", low=1, needs=(SAVING,), on_resume=OnResume.FREE
    )
    keep_best: bool = option(
        True,
        "Keep the checkpoint with the lowest loss in an evaluation too",
        needs=(SAVING,),
        on_resume=OnResume.FREE,
    )
    keep_every: int = option(
        0,
        "Keep checkpoints whose step is a multiple of this for good; 0 for none",
        low=0,
        needs=(SAVING,),
        on_resume=OnResume.FREE,
    )
    on_save_error: str = option(
        "stop",
        "When a checkpoint cannot be written: stop the run, or continue and try again at the next",
        choices=("stop", "continue"),
        on_resume=OnResume.FREE,
    )
    resume: str = option(
        "none",
        "Continue a run: auto (the newest valid checkpoint of --name, if there is one), none, or the path of a run, a "
        "checkpoint, or an archive that `crosstune move` wrote",
        aliases=("resume_from_checkpoint",),
        on_resume=OnResume.ONE_START,
    )
    allow_mismatch: str = option(
        "",
        f"What may differ from the checkpoint when a run continues, with commas: {', '.join(MISMATCHES)}",
        needs=(RESUMING,),
        on_resume=OnResume.ONE_START,
    )
    skip_nonfinite: int = option(
        0, "Steps with a loss or gradient that is not finite to leave out before stopping", low=0
    )
    time_limit: str | None = option(
        None,
        "Stop with a checkpoint before this much time has passed, such as 3h30m",
        on_resume=OnResume.ONE_START,
    )
    eval_steps: int = option(
        0,
        "Evaluate every so many steps; 0 for before and after only",
        low=0,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    skip_eval: bool = option(False, "Do not evaluate at all", on_resume=OnResume.FREE | OnResume.DIVIDES_DATA)
    num_samples: int = option(
        3,
        "Held-out prompts whose answers are kept at each evaluation",
        low=0,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    max_new_tokens: int = option(
        64, "Longest answer generated in an evaluation", low=1, needs=(EVALUATION,), on_resume=OnResume.FREE
    )
    log_to: str = option(
        "tqdm",
        "Where progress goes: tqdm is the live line, stdout plain lines",
        choices=("tqdm", "stdout", "wandb"),
        on_resume=OnResume.FREE,
        unbuilt=WANDB_LOG,
    )
    log_every_n_steps: int = option(
        1,
        "Print a line every so many steps; under the live line only when asked for",
        low=1,
        on_resume=OnResume.FREE,
    )
    verbose: bool = option(False, "Print more", on_resume=OnResume.FREE)
    strict: bool = option(False, "Refuse to change anything that was asked", on_resume=OnResume.FREE)
    project_name: str = option(
        "crosstune", "Project in wandb", needs=(WANDB,), on_resume=OnResume.FREE, unbuilt=WANDB_LOG
    )
    group: str | None = option(
        None, "Group in wandb", needs=(WANDB,), on_resume=OnResume.FREE, unbuilt=WANDB_LOG
    )
    entity: str | None = option(
        None, "Entity in wandb", needs=(WANDB,), on_resume=OnResume.FREE, unbuilt=WANDB_LOG
    )
