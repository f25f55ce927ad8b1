"""Options for the run folder, checkpoints, resuming, evaluation, output and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import (
    EVALUATION,
    RESUMING,
    TRACKERS_PACKAGE,
    Condition,
    check_targets,
    trackers_in,
    with_option,
)
from crosstune.config.option import OnResume, StringKind, check_duration, option
from crosstune.core.names import plugin_names


def _with_trackers(*names: str) -> Condition:
    """Require one of these trackers in --log_to."""
    summary = " or ".join(f"`--log_to {name}`" for name in names)
    return Condition(summary, lambda now: bool({*names} & {*trackers_in(now["log_to"])}))


GENERATION = Condition(
    "evaluation, or `--recipe rl`",
    lambda now: now["recipe"] == "rl" or EVALUATION.holds(now),
)
SAVING = with_option("save_steps", "save_minutes")
EVALUATIONS = with_option("eval_steps")
LAST_RESULT = Condition("`--result last`", lambda now: now["result"] == "last")
PROJECTS = _with_trackers("wandb", "weave", "trackio")
TRACKER_GROUPS = _with_trackers("wandb", "trackio")
TRACKER_OWNERS = _with_trackers("wandb", "weave")
ANSWERS = Condition(
    "",
    lambda now: now["recipe"] != "judge" or now["head"] != "scalar",
    "with --head scalar, which does not generate text",
)
PROFILE = with_option("profile", "profile_memory")

MISMATCHES = (
    "model",
    "data",
    "eval_data",
    "order",
    "quantization",
    "trainable",
    "optimizer",
    "objective",
    "loss",
)
"""Parts of a run's identity, in message order; `objective`: the losses of preferences or distillation, `loss`: the check after a move."""
LONGEST_NAME_BYTES = 200
"""File systems allow 255 bytes, and crosstune appends to names: `~1`, or the suffix of an archive or a temporary folder."""


def mismatches(value: str) -> list[str]:
    """Return the parts of a value of `allow_mismatch`."""
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_mismatches(value: str) -> str | None:
    unknown = set(mismatches(value)) - set(MISMATCHES)
    return f"one or more of {', '.join(MISMATCHES)}, separated by commas" if unknown else None


def _check_name(value: str) -> str | None:
    wrong = value.startswith("-") or value in (".", "..") or "/" in value or "\\" in value
    if wrong or value != value.strip() or len(value.encode()) > LONGEST_NAME_BYTES:
        return f"a plain folder name of at most {LONGEST_NAME_BYTES} bytes; --output_dir sets its parent"
    return None


_option = partial(option, on_resume=OnResume.FREE)
_steps = partial(_option, high=10**12)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output_dir: str = _option("runs", "Parent folder of the run folder", holds=StringKind.PATH)
    name: str | None = _option(
        None,
        "Name of the run folder; unset: made from the time and the model",
        holds=StringKind.FOLDER_NAME,
        check=_check_name,
    )
    overwrite: bool = option(
        False,
        "Rename an existing run of the same name instead of stopping with an error",
        on_resume=OnResume.ONE_START,
    )
    save_model: bool = _option(True, "Save the trained adapter or model at the end")
    save_steps: int = _steps(0, "Save a checkpoint every N steps; 0: never")
    save_minutes: float = _option(10, "Save a checkpoint every N minutes; 0: never", high=1e6)
    keep_last_n: int = _option(3, "Number of newest checkpoints to keep", low=1, high=10**6, needs=(SAVING,))
    keep_best: bool = _option(
        True, "Also keep the checkpoint with the lowest evaluation loss", needs=(SAVING, LAST_RESULT)
    )
    keep_every: int = _steps(
        0, "Also keep checkpoints whose step is a multiple of N; 0: none", needs=(SAVING,)
    )
    on_save_error: str = _option(
        "stop",
        "If a checkpoint cannot be written: stop the run, or continue and try again at the next checkpoint",
        choices=("stop", "continue"),
    )
    resume: str = option(
        "none",
        "Resume a run: auto (from the newest valid checkpoint of --name, if any), none, or the path of a run, a checkpoint, "
        "or an archive made by `crosstune move`",
        aliases=("resume_from_checkpoint",),
        on_resume=OnResume.ONE_START,
        holds=StringKind.PATH,
    )
    allow_mismatch: str = option(
        "",
        f"Differences from the checkpoint to allow on resume, as a comma-separated list: {', '.join(MISMATCHES)}",
        needs=(RESUMING,),
        on_resume=OnResume.ONE_START,
        check=_check_mismatches,
    )
    skip_nonfinite: int = option(
        0, "Number of steps with a non-finite loss or gradient to skip before stopping", high=10**9
    )
    time_limit: str | None = option(
        None,
        "Save a checkpoint and stop before this time has passed, such as 3h30m",
        on_resume=OnResume.ONE_START,
        check=check_duration,
    )
    eval_steps: int = _steps(
        0, "Evaluate every N steps; 0: only before and after training", needs=(EVALUATION,)
    )
    early_stopping: int = _option(
        0,
        "Stop after N consecutive evaluations without a lower loss; 0: never",
        high=10**6,
        needs=(EVALUATION, EVALUATIONS),
    )
    result: str = _option(
        "auto",
        "Weights to save as the result: best (lowest evaluation loss) or last; auto: best if there was more than one "
        "evaluation",
        choices=("auto", "best", "last"),
        needs=(EVALUATION,),
    )
    skip_eval: bool = option(False, "Do not evaluate", on_resume=OnResume.FREE | OnResume.MAY_CHANGE_DATA)
    num_samples: int = _option(
        3,
        "Number of held-out prompts to answer and record in each evaluation",
        high=10**4,
        needs=(EVALUATION, ANSWERS),
    )
    max_new_tokens: int = _option(
        64,
        "Maximum number of tokens per generated answer; higher default: 512 for --recipe rl",
        aliases=("max_completion_length", "max_response_length"),
        low=1,
        high=2**20,
        needs=(GENERATION, ANSWERS),
    )
    log_to: str = _option(
        "tqdm",
        "Comma-separated list: the progress display, tqdm (a bar) or stdout (plain lines), and trackers: "
        + ", ".join(plugin_names(TRACKERS_PACKAGE)),
        check=check_targets,
        joins_items="",
    )
    log_every_n_steps: int = _option(
        1, "Print a line every N steps; with the progress bar only if set", low=1, high=10**12
    )
    verbose: bool = _option(False, "Verbose output")
    strict: bool = _option(False, "Stop with an error instead of changing an option that was set")
    project_name: str = _option("crosstune", "Project in the trackers", needs=(PROJECTS,))
    tracker_group: str | None = _option(
        None, "Run group in the trackers", aliases=("group",), needs=(TRACKER_GROUPS,)
    )
    entity: str | None = _option(None, "User or team that owns the project", needs=(TRACKER_OWNERS,))


_profiling = partial(option, needs=(PROFILE,))


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    profile: bool = option(False, "Profile training steps")
    profiling_output: str = _profiling(
        "profiles", "Folder for profiles; unset: in the run folder", holds=StringKind.PATH
    )
    profile_memory: bool = option(False, "Record memory allocations of the first steps")
    profile_with_stack: bool = _profiling(False, "Record call stacks", aliases=("with_stack",))
    profile_with_shapes: bool = _profiling(False, "Record operator input shapes", aliases=("with_shapes",))
    profile_export_trace: bool = _profiling(True, "Write a trace file", aliases=("export_trace",))
    profile_export_memory_timeline: bool = _profiling(
        False, "Write a memory timeline", aliases=("export_memory_timeline",)
    )
    profile_wait_steps: int = _profiling(
        0, "Steps to wait in each cycle", high=10**9, aliases=("wait_steps",)
    )
    profiler_warmup_steps: int = _profiling(1, "Warm-up steps in each cycle", high=10**9)
    profile_active_steps: int = _profiling(
        2, "Steps to record in each cycle", low=1, high=1000, aliases=("active_steps",)
    )
    profile_repeat: int = _profiling(
        1, "Number of profiling cycles; 0: no limit", high=10**6, aliases=("repeat",)
    )
    profiling_frequency: int = _profiling(10, "Start a profiling cycle every N steps", low=1, high=10**9)
