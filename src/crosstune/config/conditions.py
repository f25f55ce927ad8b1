"""Define the conditions for options to have an effect, and parse the options that conditions read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.config.peer_names import PREFERENCE_LOSSES
from crosstune.core.names import did_you_mean, plugin_names
from crosstune.core.schedule import SCHEDULES_WITH_FLOOR

TRACKERS_PACKAGE = "crosstune.tracking.trackers"
SCREENS = ("tqdm", "stdout")
NONE = "none"
"""No tracker; the value in other trainers."""


def targets_in(value: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


def trackers_in(value: str) -> list[str]:
    """Return the trackers in a value of --log_to."""
    return [name for name in targets_in(value) if name not in (*SCREENS, NONE)]


def screen_in(value: str) -> str:
    """Return the progress display; a bar if only trackers are listed."""
    return next((name for name in targets_in(value) if name in SCREENS), SCREENS[0])


def check_targets(value: str) -> str | None:
    """Return the accepted values of --log_to if a value is invalid."""
    names, known = targets_in(value), [*SCREENS, *plugin_names(TRACKERS_PACKAGE), NONE]
    accepted = f"one or more of {', '.join(known)}, separated by commas"
    for name in names:
        if name not in known:
            return f"{accepted}; {did_you_mean(name, known)}".rstrip("; ")
    if set(SCREENS) <= set(names):
        return "either tqdm or stdout, and any trackers"
    if NONE in names and trackers_in(value):
        return f"either {NONE} or trackers"
    return None if names else accepted


KTO = "kto"
LOSSES = (
    "dpo",
    "ipo",
    "hinge",
    "robust",
    "apo_zero",
    "apo_down",
    "nca",
    "bco",
    "sppo",
    "orpo",
    "simpo",
    "cpo",
    "sft",
    KTO,
)
"""Values of --preference_loss."""
WITHOUT_REFERENCE = ("orpo", "simpo", "cpo", "sft")


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """The work for a row of data."""

    num_answers: int = 1
    """2 for a pair: each answer may be as long as the context."""
    num_passes: int = 0
    """Forward passes without gradients in each step."""
    num_first_passes: int = 0
    """Forward passes over the data before the first step."""
    copies_weights: bool = False
    """True if a copy of the initial trained weights is kept."""


def work_of_rows(options: Mapping[str, Any]) -> RowWork:
    """Return the work for a row of the recipe and loss of these options."""
    if options["recipe"] == "rl":
        # The passes for the reference, and for the answers before the first of several steps on them.
        strength = options["beta"]
        has_reference = strength > 0 if strength is not None else options["rl_loss"] == "rloo"
        passes = has_reference + (options["num_iterations"] > 1) / options["num_iterations"]
        return RowWork(
            num_answers=options["num_generations"], num_passes=round(passes), copies_weights=has_reference
        )
    if options["recipe"] == "distill" and teaches_by_base(options):
        stores = bool(options["teacher_top_k"])
        return RowWork(num_passes=int(not stores), num_first_passes=int(stores), copies_weights=not stores)
    if options["recipe"] != "preference":
        return RowWork()
    losses = parse_losses(options["preference_loss"])
    single = KTO in losses  # with an answer to another prompt, for the KL estimate
    answers, others = (1, 1) if single else (2, 0)
    if all(name in WITHOUT_REFERENCE for name in losses):
        return RowWork(num_answers=answers)
    if is_precomputed(options["reference"], options["train_type"]):
        return RowWork(num_answers=answers, num_passes=others, num_first_passes=1 + others)
    return RowWork(num_answers=answers, num_passes=1 + 2 * others, copies_weights=True)


def teaches_by_base(options: Mapping[str, Any], *, is_student: bool | None = None) -> bool:
    """Return True if the teacher is the base under the trained adapters, so that no second model is loaded. `is_student`:
    True if both have the same weights; by default their names decide."""
    same = options["teacher"] == options["model_name"] if is_student is None else is_student
    starts = not options["base_adapter"] and options["init_lora"] == "default"
    plain = not (options["modules_to_save"] or options["add_tokens"])
    plain = plain and "lm_head" not in targets_in(options["lora_target_modules"])
    adapters = TRAIN_TYPE_PARTS[options["train_type"]][0] in ADAPTER_METHODS
    return same and adapters and starts and plain and options["teacher_quantization"] == "none"


def is_precomputed(reference: str, train_type: str) -> bool:
    """Return whether the reference of a preference run is computed before the first step."""
    adapters = TRAIN_TYPE_PARTS[train_type][0] in ADAPTER_METHODS
    return reference == "precomputed" or (reference == "auto" and not adapters)


def parse_losses(text: str) -> dict[str, float]:
    """Return the weight of each loss in `dpo` or `dpo:0.8,sft:1`. Raise a ValueError with the accepted values."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (each.strip() for each in part.partition(":"))
        try:
            number = float(weight) if weight else 1.0
        except ValueError:
            number = 0.0
        if name not in LOSSES or name in weights or not 0 < number <= 1e6:
            if (known := PREFERENCE_LOSSES.get(name, name)) != name:
                raise ValueError(f"{known}; {name} is called {known} here")
            hint = f"; {did_you_mean(name, LOSSES)}".rstrip("; ") if name not in LOSSES else ""
            raise ValueError(
                f"one or more of {', '.join(LOSSES)}, each once and with a weight above 0, as in dpo or dpo:0.8,sft:1{hint}"
            )
        weights[name] = number
    if KTO in weights and len(weights) > 1:
        raise ValueError(f"{KTO} alone, since its rows are single answers, or other losses without it")
    if list(weights) == ["sft"]:
        raise ValueError("a preference loss together with sft; for sft alone, use --recipe sft")
    return weights


def check_losses(value: str) -> str | None:
    """Return the accepted values of --preference_loss if a value is invalid."""
    try:
        parse_losses(value)
    except ValueError as error:
        return str(error)
    return None


TRAIN_TYPE_PARTS: Mapping[str, tuple[str, str]] = {
    "full": ("full", "none"),
    "lora": ("lora", "none"),
    "qlora": ("lora", "auto"),
    "dora": ("dora", "none"),
    "llama_pro": ("llama_pro", "none"),
    "custom_lora": ("lora", "none"),
    "custom_qlora": ("lora", "auto"),
    "hqq_lora": ("lora", "hqq"),
    "hqq_dora": ("dora", "hqq"),
    "bnb_dora": ("dora", "bnb"),
    "bnb_llama_pro": ("llama_pro", "bnb"),
    "hqq_llama_pro": ("llama_pro", "hqq"),
}
"""Train type -> (method, quantizer)."""
ADAPTER_METHODS = ("lora", "dora")
REPLICATED = ("ddp", "no_shard")
"""Values of --sharding_strategy that replicate the model in every process."""


Values = Mapping[str, Any]
"""A plan's options and decisions: engine, method, quantizer, scheme (the quantizer's description), n_bits, world_size."""


@dataclass(frozen=True)
class Condition:
    """A condition for an option to have an effect."""

    summary: str
    """Text after "only with" in the options page; empty if the option's help text contains it."""
    holds: Callable[[Values], bool]
    otherwise: str = ""
    """Text after "has no effect", a template for the values; by default made from the summary."""
    recipes: tuple[str, ...] = ()
    """The recipes in which it can be met; empty: all."""

    def reason(self, now: Values) -> str:
        """Return why the option has no effect."""
        otherwise = self.otherwise.format(**now) or f"without {self.summary.replace('`', '')}"
        return f"has no effect {otherwise}"


def shards_weights(strategy: str) -> bool:
    """True if a value of --sharding_strategy shards the weights."""
    return strategy not in REPLICATED


def _with_trackers(*names: str) -> Condition:
    """Require one of these trackers in --log_to."""
    summary = " or ".join(f"`--log_to {name}`" for name in names)
    return Condition(summary, lambda now: bool({*names} & {*trackers_in(now["log_to"])}))


def _with_recipe(*names: str, otherwise: str = "with the {recipe} recipe") -> Condition:
    """Require one of these recipes."""
    summary = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return Condition(
        f"`--recipe` {summary}" if names[1:] else f"`--recipe {summary}`",
        lambda now: now["recipe"] in names,
        otherwise,
        recipes=names,
    )


def _with_losses(*names: str) -> Condition:
    return Condition(
        f"`--preference_loss` {', '.join(names)}",
        lambda now: any(name in names for name in parse_losses(now["preference_loss"])),
        "with --preference_loss {preference_loss}",
    )


def _with_option(*names: str) -> Condition:
    """Require one of these options to be neither 0 nor false."""
    return Condition(
        " or ".join(f"`--{name}`" for name in names), lambda now: any(now[name] for name in names)
    )


ADAPTERS = Condition("lora or dora", lambda now: now["method"] in ADAPTER_METHODS, "with method {method}")
LLAMA_PRO = Condition("llama_pro", lambda now: now["method"] == "llama_pro", "without a llama_pro train type")
BLOCKS_TO_ADD = Condition(
    "", lambda now: not now["llama_pro_path"], "with --llama_pro_path: its model is already expanded"
)
QUANTIZED_BASE = Condition("a quantized base", lambda now: now["scheme"] is not None)
QUANTIZING_TRAIN_TYPE = Condition(
    "a train type that quantizes",
    lambda now: TRAIN_TYPE_PARTS[now["train_type"]][1] != "none",
    "with train_type {train_type}",
)
ROPE_SCALING = Condition(
    "`--rope_scaling`", lambda now: now["rope_scaling"] != "none", "with --rope_scaling none"
)
SCALES_BY_GROUP = Condition(
    "",
    lambda now: now["scheme"] is not None and now["n_bits"] not in now["scheme"].bits_by_row,
    "with {quantizer} and {n_bits} bits: they use one scale per row",
)
DOUBLE_QUANT = Condition(
    "",
    lambda now: now["scheme"] is not None and now["n_bits"] in now["scheme"].bits_with_double_quant,
    "with {quantizer} and {n_bits} bits",
)
STREAMED_LOADING = Condition(
    "a quantized base or llama_pro",
    lambda now: now["scheme"] is not None or now["method"] == "llama_pro",
)
TORCH_ENGINE = Condition("the torch engine", lambda now: now["engine"] == "torch", "on the MLX engine")
MLX_ENGINE = Condition(
    "",
    lambda now: now["engine"] == "mlx",
    "on memory or compilation outside the MLX engine; its other settings apply",
)
LATENT_DIFFUSION = _with_recipe("latent_diffusion")
SEVERAL_DEVICES = Condition("several devices", lambda now: now["world_size"] > 1, "with one device")
SHARDED_MODEL = Condition("", lambda now: now["engine"] != "mlx", "on MLX, which replicates the model")
SHARDED_WEIGHTS = Condition(
    "a strategy that shards",
    lambda now: shards_weights(now["sharding_strategy"]),
    "with --sharding_strategy {sharding_strategy}, which replicates the model",
)
DEVICE_MEMORY = Condition(
    "a device with dedicated memory",
    lambda now: now["backend"] != "cpu",
    "on a CPU: activations are already in host memory",
)
ROWS_BY_BATCH = Condition(
    "", lambda now: not now["rows_per_step"], "with --rows_per_step, which sets the rows of a step"
)
RECOMPUTATION = _with_option("use_gradient_checkpointing")
CLIPPING = _with_option("apply_gradient_clipping")
ADAM = Condition("adamw or adam", lambda now: "adam" in now["optimizer"], "with optimizer {optimizer}")
STEPS_BY_GRADIENT = Condition(
    "",
    lambda now: not now["optimizer"].startswith("lion"),
    "on the size of a step with {optimizer}: it uses only the signs of averaged gradients",
)
SCHEDULE_WITH_FLOOR = Condition(
    ", ".join(SCHEDULES_WITH_FLOOR),
    lambda now: now["lr_scheduler"] in SCHEDULES_WITH_FLOOR,
    "with lr_scheduler {lr_scheduler}",
)
EVALUATION = Condition("evaluation", lambda now: not now["skip_eval"] and now["eval_samples"] > 0)
GENERATION = Condition(
    "evaluation, or `--recipe rl`",
    lambda now: now["recipe"] == "rl" or (not now["skip_eval"] and now["eval_samples"] > 0),
    "without evaluation",
)
NO_SKIP_EVAL = Condition("evaluation", lambda now: not now["skip_eval"])
SAVING = _with_option("save_steps", "save_minutes")
EVALUATIONS = _with_option("eval_steps")
LAST_RESULT = Condition(
    "`--result last`",
    lambda now: now["result"] == "last",
    "with --result {result}, which keeps the best checkpoint in any case",
)
RESUMING = Condition("`--resume`", lambda now: now["resume"] != "none")
PROJECTS = _with_trackers("wandb", "weave", "trackio")
TRACKER_GROUPS = _with_trackers("wandb", "trackio")
TRACKER_OWNERS = _with_trackers("wandb", "weave")
JUDGE = _with_recipe("judge")
PREFERENCE = _with_recipe("preference")
DISTILL = _with_recipe("distill")
JSD = Condition(
    "`--distill_loss jsd`",
    lambda now: now["distill_loss"] == "jsd",
    "with --distill_loss {distill_loss}",
)
WITH_REFERENCE = _with_losses(*(name for name in LOSSES if name not in WITHOUT_REFERENCE))
SMOOTHED_LOSS, SIMPO, KTO_LOSS = (
    _with_losses(*names) for names in (("dpo", "robust", "simpo", "cpo"), ("simpo",), (KTO,))
)
RL = _with_recipe("rl")
PREFERENCE_OR_RL = _with_recipe("preference", "rl")
CLIPPED_LOSS = Condition(
    "another loss than reinforce", lambda now: now["rl_loss"] != "reinforce", "with --rl_loss reinforce"
)
PAIRED_LOSS = Condition(
    f"a `--preference_loss` other than {KTO}",
    lambda now: KTO not in parse_losses(now["preference_loss"]),
    "with --preference_loss {preference_loss}, whose rows have one answer",
)
CORRECTED = Condition(
    "a correction",
    lambda now: now["importance_correction"] != "none",
    "with --importance_correction none",
)
HELD_OUT_BY_FRACTION = _with_recipe("sft", "preference", "rl", "distill")
WITH_ROWS = _with_recipe("sft", "preference", "judge", "rl", "distill")
SFT = _with_recipe("sft")
CONVERSATIONS = _with_recipe("sft", "distill")
ANSWERS_COMPARED = _with_recipe(
    "sft", "distill", otherwise="with the {recipe} recipe, which has its own metrics"
)
ROWS_WITH_FORMATS = Condition(
    "",
    lambda now: now["recipe"] in ("sft", "distill"),
    "with the {recipe} recipe, whose rows have one format",
    recipes=("sft", "distill"),
)
SCALAR_HEAD = Condition("`--head scalar`", lambda now: now["head"] == "scalar")
LABELS = Condition("", lambda now: now["head"] != "scalar", "with --head scalar, which predicts a number")
ANSWERS = Condition(
    "",
    lambda now: now["recipe"] != "judge" or now["head"] != "scalar",
    "with --head scalar, which does not generate text",
)
FP8_BASE = Condition("`--base_precision fp8`", lambda now: now["base_precision"] == "fp8")
PROFILE = _with_option("profile", "profile_memory")
