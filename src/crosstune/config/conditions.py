"""Define the conditions for options to have an effect, and parse the options that conditions read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.config.peer_names import PREFERENCE_LOSSES
from crosstune.core.names import did_you_mean, plugin_names

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


def with_recipe(*names: str, otherwise: str = "with the {recipe} recipe") -> Condition:
    """Require one of these recipes."""
    summary = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return Condition(
        f"`--recipe` {summary}" if names[1:] else f"`--recipe {summary}`",
        lambda now: now["recipe"] in names,
        otherwise,
        recipes=names,
    )


def with_option(*names: str) -> Condition:
    """Require one of these options to be neither 0 nor false."""
    return Condition(
        " or ".join(f"`--{name}`" for name in names), lambda now: any(now[name] for name in names)
    )


TORCH_ENGINE = Condition("the torch engine", lambda now: now["engine"] == "torch", "on the MLX engine")
EVALUATION = Condition("evaluation", lambda now: not now["skip_eval"] and now["eval_samples"] > 0)
RESUMING = Condition("`--resume`", lambda now: now["resume"] != "none")
RL = with_recipe("rl")
SFT = with_recipe("sft")
