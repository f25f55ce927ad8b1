"""Options for the run folder, checkpoints, resuming, evaluation and output."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import (
    EVALUATION,
    EVALUATIONS,
    PROFILE,
    PROJECTS,
    RESUMING,
    SAVING,
    TRACKER_GROUPS,
    TRACKER_OWNERS,
    check_targets,
)
from crosstune.config.option import Holds, OnResume, check_duration, option

MISMATCHES = ("model", "data", "eval_data", "order", "quantization", "trainable", "optimizer", "loss")
"""The values of `allow_mismatch`."""


LONGEST_NAME_BYTES = 200
"""File systems allow 255; crosstune appends to the name: `~1`, the suffix of an archive or a temporary folder."""


def mismatches(value: str) -> list[str]:
    """Return the parts of a value of `allow_mismatch`."""
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_mismatches(value: str) -> str | None:
    unknown = set(mismatches(value)) - set(MISMATCHES)
    return f"one or more of {', '.join(MISMATCHES)}, with commas between them" if unknown else None


def _check_name(value: str) -> str | None:
    wrong = value.startswith("-") or value in (".", "..") or "/" in value or "\\" in value
    if wrong or value != value.strip() or len(value.encode()) > LONGEST_NAME_BYTES:
        return f"a plain folder name of at most {LONGEST_NAME_BYTES} bytes; --output_dir sets its parent"
    return None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output_dir: str = option("runs", "Folder for run folders", on_resume=OnResume.FREE, holds=Holds.PATH)
    name: str | None = option(
        None,
        "Name of the run folder; unset: made from the time and the model",
        on_resume=OnResume.FREE,
        holds=Holds.FOLDER_NAME,
        check=_check_name,
    )
    overwrite: bool = option(
        False,
        "Rename an existing run of this name instead of stopping with an error",
        on_resume=OnResume.ONE_START,
    )
    save_model: bool = option(True, "Save the trained adapter or model at the end", on_resume=OnResume.FREE)
    save_steps: int = option(
        0, "Save a checkpoint every N steps; 0 for never", low=0, high=10**12, on_resume=OnResume.FREE
    )
    save_minutes: float = option(
        10, "Save a checkpoint every N minutes; 0 for never", low=0, high=1e6, on_resume=OnResume.FREE
    )
    keep_last_n: int = option(
        3, "Number of newest checkpoints to keep", low=1, high=10**6, needs=(SAVING,), on_resume=OnResume.FREE
    )
    keep_best: bool = option(
        True,
        "Also keep the checkpoint with the lowest evaluation loss",
        needs=(SAVING,),
        on_resume=OnResume.FREE,
    )
    keep_every: int = option(
        0,
        "Also keep every checkpoint whose step is a multiple of this; 0 for none",
        low=0,
        high=10**12,
        needs=(SAVING,),
        on_resume=OnResume.FREE,
    )
    on_save_error: str = option(
        "stop",
        "When a checkpoint cannot be written: stop the run, or continue and try again at the next checkpoint",
        choices=("stop", "continue"),
        on_resume=OnResume.FREE,
    )
    resume: str = option(
        "none",
        "Continue a run: auto (from the newest valid checkpoint of --name, if there is one), none, or the path of a run, a "
        "checkpoint, or an archive made by `crosstune move`",
        aliases=("resume_from_checkpoint",),
        on_resume=OnResume.ONE_START,
        holds=Holds.PATH,
    )
    allow_mismatch: str = option(
        "",
        f"What may differ from the checkpoint when resuming, as a comma-separated list: {', '.join(MISMATCHES)}",
        needs=(RESUMING,),
        on_resume=OnResume.ONE_START,
        check=_check_mismatches,
    )
    skip_nonfinite: int = option(
        0, "Number of steps with a non-finite loss or gradient to skip before stopping", low=0, high=10**9
    )
    time_limit: str | None = option(
        None,
        "Save a checkpoint and stop before this much time has passed, such as 3h30m",
        on_resume=OnResume.ONE_START,
        check=check_duration,
    )
    eval_steps: int = option(
        0,
        "Evaluate every N steps; 0 for before and after training only",
        low=0,
        high=10**12,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    early_stopping: int = option(
        0,
        "Stop after N evaluations in a row without a lower loss; 0 for never",
        low=0,
        high=10**6,
        needs=(EVALUATION, EVALUATIONS),
        on_resume=OnResume.FREE,
    )
    result: str = option(
        "auto",
        "The weights to write as the result: with the lowest evaluation loss (best) or of the last step (last); "
        "auto is best if there was more than one evaluation",
        choices=("auto", "best", "last"),
        on_resume=OnResume.FREE,
    )
    skip_eval: bool = option(False, "Do not evaluate", on_resume=OnResume.FREE | OnResume.DIVIDES_DATA)
    num_samples: int = option(
        3,
        "Number of held-out prompts whose answers are recorded at each evaluation",
        low=0,
        high=10**4,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    max_new_tokens: int = option(
        64,
        "Maximum number of tokens generated per answer in an evaluation",
        low=1,
        high=2**20,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    log_to: str = option(
        "tqdm",
        "Comma-separated: how to show progress, tqdm (a bar) or stdout (plain lines), and trackers: wandb, weave, trackio, "
        "tensorboard",
        on_resume=OnResume.FREE,
        check=check_targets,
        joins_items="",
    )
    log_every_n_steps: int = option(
        1,
        "Print a line every N steps; with the progress bar only when this option is set",
        low=1,
        high=10**12,
        on_resume=OnResume.FREE,
    )
    verbose: bool = option(False, "Print more", on_resume=OnResume.FREE)
    strict: bool = option(
        False, "Stop with an error instead of changing an option that was set", on_resume=OnResume.FREE
    )
    project_name: str = option(
        "crosstune", "Project of the run in its trackers", needs=(PROJECTS,), on_resume=OnResume.FREE
    )
    tracker_group: str | None = option(
        None,
        "Group of the run in its trackers",
        aliases=("group",),
        needs=(TRACKER_GROUPS,),
        on_resume=OnResume.FREE,
    )
    entity: str | None = option(
        None, "User or team that owns the project", needs=(TRACKER_OWNERS,), on_resume=OnResume.FREE
    )


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    profile: bool = option(False, "Profile the training steps")
    profiling_output: str = option(
        "profiles",
        "Folder for profiles; in the run folder unless it is given",
        needs=(PROFILE,),
        holds=Holds.PATH,
    )
    profile_memory: bool = option(False, "Record memory allocations of the first steps")
    profile_with_stack: bool = option(False, "Record call stacks", aliases=("with_stack",), needs=(PROFILE,))
    profile_with_shapes: bool = option(
        False, "Record operator input shapes", aliases=("with_shapes",), needs=(PROFILE,)
    )
    profile_export_trace: bool = option(
        True, "Write a trace file", aliases=("export_trace",), needs=(PROFILE,)
    )
    profile_export_memory_timeline: bool = option(
        False, "Write a memory timeline", aliases=("export_memory_timeline",), needs=(PROFILE,)
    )
    profile_wait_steps: int = option(
        0,
        "Number of steps to wait in each cycle",
        low=0,
        high=10**9,
        aliases=("wait_steps",),
        needs=(PROFILE,),
    )
    profiler_warmup_steps: int = option(
        1, "Number of warm-up steps in each cycle", low=0, high=10**9, needs=(PROFILE,)
    )
    profile_active_steps: int = option(
        2,
        "Number of steps to record in each cycle",
        low=1,
        high=10**6,
        aliases=("active_steps",),
        needs=(PROFILE,),
    )
    profile_repeat: int = option(
        1,
        "Number of profiling cycles; 0 for no limit",
        low=0,
        high=10**6,
        aliases=("repeat",),
        needs=(PROFILE,),
    )
    profiling_frequency: int = option(
        10, "Begin a profiling cycle every N steps", low=1, high=10**9, needs=(PROFILE,)
    )
