"""An option that a user sets changes the run, or the run says that it does not.

Every option is set to another value in every context (recipe, method, optimizer, engine). It must be rejected by name, changed
or reported as without effect in the plan, or change the data, two steps or an evaluation of a tiny model. Plans are made for
all, runs for every pair of an option with one of its values, a recipe, an engine, a method or an optimizer; `make options` runs all.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crosstune import Run
from crosstune.config.load import make_config
from crosstune.config.option import Option
from crosstune.config.options.training import OPTIMIZERS
from crosstune.config.recipe_spec import recipe_names
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import option_list, options_by_name
from crosstune.core.errors import UserError
from crosstune.core.quantization import quantizer_names
from crosstune.estimate.machine import Machine
from crosstune.machines.probe import probe_machine
from crosstune.planner.gather import make_plan
from crosstune.runs import pipeline

WITHOUT_NUMBERS = {
    "where a run is and what it keeps": (
        "output_dir name overwrite save_model save_steps save_minutes keep_last_n keep_best keep_every on_save_error "
        "resume allow_mismatch"
    ),
    "what is shown or sent": "log_to log_every_n_steps verbose strict project_name tracker_group entity",
    "measures the steps": (
        "profile profiling_output profile_memory profile_with_stack profile_with_shapes profile_export_trace "
        "profile_export_memory_timeline profile_wait_steps profiler_warmup_steps profile_active_steps profile_repeat "
        "profiling_frequency"
    ),
    "matters only when something fails or takes long": (
        "skip_nonfinite time_limit max_restarts connect_timeout collective_timeout heartbeat_timeout debug_collectives"
    ),
    "trades memory for time, with the same numbers": (
        "low_memory use_gradient_checkpointing reentrant_checkpointing use_activation_cpu_offload use_cpu_offload "
        "loading_workers eval_batch_size torch_compile"
    ),
    "divides the same numbers among processes": (
        "world_size context_parallel sharding_strategy distributed_backend no_sync master_addr master_port"
    ),
    "runs something else": "emulate",
    "matters only for groups without spread": "dynamic_sampling",
    "matters where generator and training pass differ": "importance_correction importance_cap sampler_bound",
    "is used by the test that `judge train` adds": "test_dataset judge_by eval_backend",
    "matters only if rows of two splits are the same": "leaks",
    "matters only for bad or repeated rows": "dedup skip_bad_rows data_rules",
    "matters only when a finished run is extended": "on_extend",
    "limits or permits what rewards do": (
        "reward_timeout reward_memory reward_patience allow_remote_rewards rubric watch_judge"
    ),
    "computes the same numbers in another way": "reference share_prompts",
    "is the context itself": "recipe teacher train_type backend model_name dataset optimizer llama_pro_path mlx_config",
}
"""Why options do not change numbers -> those options."""

VALUES: Mapping[str, Any] = {
    "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 0.1, "neftune_alpha": 20.0, "eval_fraction": 0.4,
    "router_aux_loss_coef": 0.1,
    "layers_to_transform": "1", "modules_to_save": "norm", "add_tokens": "<a>", "rope_factor": 3.0,
    "lr": 0.004, "wd": 0.3, "warmup_steps": 2, "warmup_ratio": 0.9, "cosine_min_lr_ratio": 0.7, "grad_norm": 0.01,
    "seed": 7, "num_epochs": 0.00001, "max_steps": 1, "batch_size": 3, "gradient_accumulation_steps": 2,
    "rows_per_step": 3, "lora_rank": 3, "lora_alpha": 5, "lora_dropout": 0.5, "lora_target_modules": "q_proj",
    "loraplus_lr_ratio": 9, "num_new_blocks": 2, "n_bits": 8, "group_size": 32, "fp8_tolerance": 0.1,
    "dataset_samples": 3, "eval_samples": 0, "context_length": 20, "num_samples": 0, "max_new_tokens": 5,
    "eval_steps": 1, "early_stopping": 1, "ema_decay": 0.5, "score_scale": "0-20", "group_by": "letter",
    "mode_weights": "l2t:0.5,t2l:0.5", "sequential_schedule": "l2t:1,unconditional:1", "cfg_dropout_prob": 0.9,
    "latent_noise": 0.5, "text_loss_weight": 3.0, "latent_loss_weight": 3.0, "hidden_size": 48, "n_blocks": 1,
    "n_heads": 4, "cond_dim": 16, "latent_tokens": 2, "latent_dim": 96, "dropout": 0.5, "decode_steps": 1,
    "preference_loss": "ipo", "beta": 0.7, "label_smoothing": 0.2, "simpo_gamma": 3.0, "desirable_weight": 2.0,
    "undesirable_weight": 2.0, "sft_weight": 0.5, "center_rewards": 3.0,
    "reward": "json", "reward_weights": "0.5",
    "num_generations": 3, "temperature": 0.4, "epsilon": 1e-6, "epsilon_high": 1e-6, "num_iterations": 2,
    "teacher_top_k": 2, "distill_beta": 0.9, "distill_temperature": 3.0, "ce_weight": 0.7, "on_policy_share": 1.0,
    "guidance": 30.0, "columns": "prompt=text", "chat_template": "alpaca",
}  # fmt: skip
"""Values of options that are neither flags nor choices."""

VALUES_OF_RECIPE: Mapping[tuple[str, str], Any] = {
    ("judge", "columns"): "letter=rubric",
    ("preference", "eval_fraction"): 0.05,
    ("rl", "eval_fraction"): 0.05,
    ("judge", "context_length"): 30,
    ("latent_diffusion", "context_length"): 2,
}
"""(recipe, option) -> its value, where the value above would say nothing about the recipe."""

OF_OPTIMIZER = ("lr", "wd", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Options that each optimizer reads in its own way."""

OF_RECIPES = ("Distillation", "Judge", "Latent diffusion", "Preference", "Reinforcement learning", "Rewards")
"""Groups of options that each kind of head or loss may read in its own way."""

TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "truncation": {"context_length": 20},
    "early_stopping": {"eval_steps": 1, "max_steps": 4, "lr": 1e-30},  # no evaluation has a lower loss
    "lr_scheduler": {"max_steps": 4},
    "fp8_tolerance": {"base_precision": "fp8"},
    "apply_gradient_clipping": {"ce_weight": 9.0},  # distillation's gradients are below the limit
    "epsilon": {"num_iterations": 2, "lr": 0.1},
    "epsilon_high": {"num_iterations": 2, "lr": 0.003},
}
"""Option -> other options without which a run of two steps cannot show its effect, where the context accepts them."""


@dataclass(frozen=True)
class Context:
    recipe: str
    train_type: str
    optimizer: str
    backend: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(
            (self.recipe, self.train_type, self.optimizer, self.backend, *map(str, self.more.values()))
        )

    def pairs(self, option: Option, value: Any) -> set[tuple[str, ...]]:
        """Return what a run of the context shows about an option."""
        more = {
            key: str(self.more[key])
            for key in ("head", "loss_type", "preference_loss", "skip_eval")
            if key in self.more
        }
        if option.name in OF_OPTIMIZER:
            more = {"optimizer": self.optimizer}
        elif option.group in ("Method", "Hardware"):
            more = {"train_type": self.train_type}
        elif option.group not in OF_RECIPES:
            more = {}
        shown = {"value": str(value), "recipe": self.recipe, "backend": self.backend} | more
        return {(option.name, *each) for each in shown.items()}

    def asked(self, home: Path) -> dict[str, Any]:
        asked: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("recipe", "train_type", "optimizer", "backend")},
            "precision": "fp32",
            "max_steps": 2,
            "batch_size": 2,
            "save_minutes": 0,
            "output_dir": str(home / "runs"),
            "name": "run",
            "overwrite": True,
        }
        evaluates = "skip_eval" not in self.more
        if evaluates:
            asked["eval_samples"] = 2
        if self.recipe == "latent_diffusion":
            few = {"decode_steps": 2} if evaluates else {}
            return asked | {"hidden_size": 32, "n_blocks": 2} | few | self.more
        asked |= {"model_name": str(home / "tiny"), "dataset": str(home / f"{self.recipe}.jsonl")}
        if evaluates and "scalar" not in self.more.values():
            asked |= {"num_samples": 1, "max_new_tokens": 2}
        if "lora" in self.train_type or "dora" in self.train_type:
            asked["lora_rank"] = 4
        if self.recipe == "rl":
            asked["reward"] = f"{home}/vowels.py:vowels"
        if self.recipe == "distill":
            asked["teacher"] = str(home / "teacher")
        return asked | self.more


CONTEXTS = (
    Context("sft", "lora", "adamw", "cpu"),
    Context("sft", "lora", "adamw", "cpu", {"skip_eval": True}),
    Context("sft", "full", "sgd", "mlx", {"lr": 0.01}),
    Context("sft", "dora", "adafactor", "mlx"),
    Context("sft", "qlora", "adam", "cpu", {"quantization_backend": "hqq"}),
    Context("sft", "qlora", "adadelta", "mlx", {"group_size": 64, "lr": 0.01}),
    Context("sft", "llama_pro", "adafactor", "cpu"),
    Context("sft", "bnb_dora", "adamw_8bit", "cpu"),
    Context("sft", "custom_lora", "lion", "mlx"),
    Context("sft", "full", "fused_adam", "cpu"),
    Context("sft", "hqq_llama_pro", "lion_8bit", "cpu"),
    Context("judge", "lora", "adamw", "mlx"),
    Context("judge", "full", "lion", "cpu"),
    Context("judge", "lora", "adam", "cpu", {"head": "scalar"}),
    Context("latent_diffusion", "full", "adamw", "cpu"),
    Context("latent_diffusion", "full", "adam", "cpu", {"loss_type": "random"}),
    Context(
        "latent_diffusion",
        "full",
        "adafactor",
        "cpu",
        {"loss_type": "sequential", "sequential_schedule": "l2t:1"},
    ),
    Context("latent_diffusion", "full", "adamw", "cpu", {"skip_eval": True}),
    Context("judge", "lora", "adamw", "cpu", {"skip_eval": True}),
    Context("preference", "lora", "adamw", "cpu"),
    Context("rl", "lora", "adamw", "cpu", {"num_generations": 2}),
    Context("preference", "full", "sgd", "mlx", {"preference_loss": "simpo", "lr": 0.01}),
    Context("preference", "lora", "adam", "cpu", {"preference_loss": "kto", "eval_samples": 8}),
    Context("preference", "dora", "lion", "cpu", {"preference_loss": "orpo"}),
    Context("preference", "lora", "adamw", "mlx", {"preference_loss": "robust", "label_smoothing": 0.1}),
    Context("distill", "lora", "adamw", "cpu", {"distill_loss": "jsd", "ce_weight": 9.0}),
    Context("distill", "lora", "adamw", "mlx"),
)


SAME_HERE = {
    ("dataset_format", "prompt_completion"): "what auto finds in these rows",
    ("eval_metric", "loss"): "what auto chooses for these rows",
    ("quantization_backend", "none"): "what auto chooses without a quantized train type",
    ("use_flash_attention", True): "the default where it is available",
    ("result", "best"): "what auto chooses after two evaluations",
    ("result", "last"): "the last weights are the best here",
    ("latent_dim", 96): "the dimension of these pairs",
    ("references", "optional"): "all rows have a reference",
    ("verdict", "digit"): "what auto chooses for scores from 0 to 10",
    ("quant_type", "nf4"): "what auto chooses with bnb",
    ("quant_type", "int"): "what auto chooses with hqq",
    ("scale_rewards", "group"): "what auto chooses for dapo",
    ("rl_loss", "grpo"): "dapo for answers of one length",
    ("rl_loss", "bnpo"): "dapo for one micro-batch",
}
"""Value -> why a run does with it what it does by default, unless the plan says that it has no effect."""

Case = tuple[Context, str, Any]


def other_values(name: str, recipe: str = "sft") -> list[Any]:
    """Return values of an option other than its default, without those that need files or other software."""
    option = next(option for option in option_list() if option.name == name)
    if option.type is bool:
        return [not option.default]
    if option.choices is not None:
        return [value for value in option.choices if value != option.default]
    return [VALUES_OF_RECIPE.get((recipe, name), VALUES[name])] if name in VALUES else []


def all_cases(*contexts: Context) -> list[Case]:
    quiet = {name for names in WITHOUT_NUMBERS.values() for name in names.split()}
    names = [option.name for option in option_list() if option.name not in quiet]
    return [
        (each, name, value)
        for each in contexts
        for name in names
        for value in other_values(name, each.recipe)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from crosstune.models.tiny import tiny_model

    home = tmp_path_factory.mktemp("effects")
    tiny_model(home / "tiny")
    tiny_model(home / "teacher", hidden=96)
    words = [
        "red",
        "green",
        "blue",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ]
    rows = {
        "sft": [{"prompt": f"Say {word}.", "completion": word * 3, "text": word} for word in words],
        "judge": [
            {
                "task": f"say {word}",
                "answer": word,
                "reference": word,
                "score": number % 10 + 0.3,
                "critique": "fine",
                "letter": word[0],
            }
            for number, word in enumerate(words * 2)
        ],
    }
    rows["preference"] = [
        {"prompt": f"Say {word}.", "chosen": word * 3, "rejected": "no " + word, "text": word}
        for word in words * 2
    ]
    rows["rl"] = [{"prompt": f"Say {word}.", "text": word} for word in words * 2]
    (home / "vowels.py").write_text(
        "def vowels(completions, **columns):\n"
        "    return [sum(x in 'aeiou' for x in one) / max(1, len(one)) + ('red' in one) for one in completions]\n"
    )
    rows["distill"] = rows["sft"]
    for name, each in rows.items():
        (home / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in each))
    return home


class Sweep:
    """Tries options on one machine, and remembers what runs without them do."""

    def __init__(self, home: Path, *, quantizers: Sequence[str]) -> None:
        self.home = home
        self.machine: Machine = probe_machine(backends=["cpu", "mlx"], quantizers=quantizers)
        self.known: dict[str, Any] = {}
        self.plans: dict[str, Plan] = {}

    def unanswered(self, cases: list[Case]) -> list[Case]:
        """Return the cases that a run has to show."""
        return [case for case in cases if case[1:] not in SAME_HERE and not self.is_answered(*case)]

    def silent(self, cases: list[Case]) -> list[str]:
        """Return the options that change no run."""
        return [
            f"--{name} {value} with {context}"
            for context, name, value in cases
            if not self.changes_run(context, name, value)
        ]

    def is_answered(self, context: Context, name: str, value: Any) -> bool:
        """True if the plan rejects or changes the option, says that it has no effect, or chooses the value without it."""
        asked = context.asked(self.home)
        key = str(context)
        if key not in self.plans:
            self.plans[key] = self.plan(asked)
        before = self.plans[key]
        chosen = before.config.options() | {"quantization_backend": before.quantizer}
        if value in (asked.get(name), chosen[name]):
            return True
        try:
            plan = self.plan(asked | {name: value})
        except UserError as error:
            assert name in str(error), f"--{name} {value} with {context}: {error}"
            return True
        answers = [a for a in plan.adjustments if a.option == name]
        return any(a.kind == "change" or "has no effect" in a.reason for a in answers)

    def changes_run(self, context: Context, name: str, value: Any) -> bool:
        """True if a run differs from the run without the option, or stops with an error about it."""
        asked = context.asked(self.home)
        more = {
            option: each
            for option, each in TOGETHER.get(name, {}).items()
            if self.accepts(asked, option, each)
        }
        before = self.remember(asked | more)
        now = self.outcome(asked | more | {name: value})
        return name in now["error"] if "error" in now else now != before

    def accepts(self, asked: Mapping[str, Any], option: str, value: Any) -> bool:
        try:
            plan = self.plan(asked | {option: value})
        except UserError:
            return False
        return not any(a.option == option and "has no effect" in a.reason for a in plan.adjustments)

    def plan(self, asked: Mapping[str, Any]) -> Plan:
        return make_plan(make_config(**asked), machine=self.machine)

    def remember(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        key = json.dumps(asked, sort_keys=True)
        if key not in self.known:
            self.known[key] = self.outcome(asked)
        return self.known[key]

    def outcome(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Train, and return everything that the run computed or said."""
        try:
            done = pipeline.train(make_config(**asked))
        except UserError as error:
            return {"error": str(error)}
        return computed(Run(done.folder, summary=done.summary))


def computed(run: Run) -> dict[str, Any]:
    """Return everything that a run computed or said."""
    assert run.result is not None
    weights = hashlib.sha256()
    for path in sorted(run.result.rglob("*.safetensors")):
        weights.update(path.read_bytes())
    plan = json.loads((run.folder / "plan.json").read_text())
    events = [{k: v for k, v in event.items() if k in _TELLING} for event in run.events]
    return {
        "steps": [[row[name] for name in ("loss", "grad_norm", "lr", "tokens")] for row in run.metrics],
        "events": [event for event in events if event.keys() - {"event"}],
        "weights": weights.hexdigest(),
        # The identity is a hash of options too; other rows change the steps or the evaluations.
        "data": {k: v for k, v in plan["data"].items() if k not in ("cache", "identity")},
        "warnings": plan["warnings"],
    }


_TELLING = ("event", "metrics", "samples", "message")


@pytest.fixture(scope="module")
def sweep(home: Path) -> Sweep:
    return Sweep(home, quantizers=quantizer_names())


def test_every_option_is_declared_once_and_can_be_tried() -> None:
    quiet = [name for names in WITHOUT_NUMBERS.values() for name in names.split()]
    names = {option.name for option in option_list()}
    assert len(quiet) == len(set(quiet)) and set(quiet) <= names and set(VALUES) <= names
    assert set(TOGETHER) <= names and {name for _, name in VALUES_OF_RECIPE} <= set(VALUES)
    untried = {name for name in names - set(quiet) if not other_values(name)}
    files = {"eval_dataset", "tokenizer", "base_adapter", "image_pixels"}
    assert untried == files, "these need files or a model of their own"


@pytest.mark.slow
def test_contexts_cover_recipes_methods_optimizers_and_engines(sweep: Sweep, home: Path) -> None:
    plans = [sweep.plan(context.asked(home)) for context in CONTEXTS]
    assert {plan.config.recipe for plan in plans} == set(recipe_names())
    assert {plan.method for plan in plans} == {"full", "lora", "dora", "llama_pro"}
    assert {plan.quantizer for plan in plans} >= {"none", "bnb", "hqq", "mlx"}
    assert {plan.engine for plan in plans} == {"torch", "mlx"}
    alike = {"fused_adamw", "paged_adamw_8bit"}  # adamw computed otherwise, and adamw_8bit on a GPU
    assert {plan.config.optimizer for plan in plans} == set(OPTIMIZERS) - alike
    for context, plan in zip(CONTEXTS, plans, strict=True):
        asked = context.asked(home)
        assert not [a for a in plan.adjustments if a.option in asked and a.kind == "change"], context
        assert not [a for a in plan.adjustments if "has no effect" in a.reason], context


def test_some_options_change_the_run_or_are_answered(home: Path) -> None:
    sweep = Sweep(home, quantizers=())  # their libraries take longer to import than the rest of the test
    asked = CONTEXTS[0].asked(home)
    assert sweep.outcome(asked) == sweep.outcome(asked), "a run is repeatable"
    few = [
        each for each in CONTEXTS if str(each) in ("judge-lora-adam-cpu-scalar", "sft-custom_lora-lion-mlx")
    ]
    cases = sweep.unanswered(random.Random(3).sample(all_cases(*few), 25))
    assert cases and not (found := sweep.silent(cases)), "\n".join(found)


def fewest(cases: list[Case]) -> list[Case]:
    """Return cases that show every pair that all of them show."""
    pairs = [context.pairs(options_by_name()[name], value) for context, name, value in cases]
    missing, chosen = set[tuple[str, ...]]().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


@pytest.fixture(scope="module")
def chosen(sweep: Sweep) -> list[Case]:
    cases = sweep.unanswered(all_cases(*CONTEXTS))
    return cases if os.environ.get("OPTIONS") == "all" else fewest(cases)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_every_option_changes_the_run_or_is_answered(
    context: Context, sweep: Sweep, chosen: list[Case]
) -> None:
    assert "error" not in sweep.remember(context.asked(sweep.home))
    found = sweep.silent([case for case in chosen if case[0] is context])
    assert not found, "\n".join(found)
