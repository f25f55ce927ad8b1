"""The declarations of options: conditions, and effects on a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest
from planned import plan_on

from crosstune.config.load import load_config, make_config
from crosstune.config.option import OnResume, Option
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config, option_list, options_by_name
from crosstune.config.table import describe_option
from crosstune.core.errors import UserError
from crosstune.data.batches.packing import PackedOrder
from crosstune.recipes.rl.recipe import RlRecipe
from crosstune.recipes.sft import OrderedRecipe
from crosstune.runs.resume import for_record
from crosstune.runs.resume_identity import (
    Difference,
    changed_options,
    check_same,
    compare,
    identity_of_options,
)

SOURCE = Path(__file__).parents[2] / "src" / "crosstune"


def test_every_option_is_read_by_some_code() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "options" and path.name != "conditions.py"
    )
    names = [option.name for option in option_list()]
    reads = r'\.{0}\b|\["{0}"\]|data_options=.*"{0}"'
    unread = {name for name in (*names, "no_such_option") if not re.search(reads.format(name), code)}
    assert unread == {"no_such_option"}


def change(was: dict[str, Any], **now: Any) -> list[str]:
    manifest = make_manifest(options=Config().options() | was)
    return [found.what for found in changed_options(manifest, make_config(**now))]


def test_a_change_is_reported_unless_it_leaves_the_training_as_it_is() -> None:
    assert change({}, lr=1e-3, save_steps=7, time_limit="3h", name="x") == ["lr"]
    assert change({}, backend="cpu", dataset="other.jsonl") == ["dataset", "backend"]


def test_what_was_asked_of_one_start_is_not_kept() -> None:
    asked = make_config(name="x", resume="auto", overwrite=True, time_limit="1h", allow_mismatch="data")
    assert set(for_record(asked).sources) == {"name"}


@pytest.mark.parametrize("option", ["seed", "skip_eval", "eval_samples", "truncation"])
def test_options_that_divide_the_data_are_named(option: str) -> None:
    other = {"seed": 1, "skip_eval": True, "eval_samples": 3, "truncation": "cut"}[option]
    manifest, config = make_manifest(options=Config().options()), make_config(**{option: other}, lr=1.0)
    with pytest.raises(UserError) as error:
        check_same([Difference("data", "training data", "a", "b")], manifest, config)
    assert f"training data: a in the checkpoint, b now; possible cause: {option}: " in error.value.why
    assert "lr" not in error.value.why


def test_an_option_without_effect_in_the_recipe_is_not_blamed() -> None:
    manifest, config = make_manifest(options=Config().options()), make_config(verdict="score", group_by="x")
    with pytest.raises(UserError) as error:
        check_same([Difference("data", "training data", "a", "b")], manifest, config)
    assert error.value.why is not None and error.value.why.endswith(
        "possible cause: its files or the tokenizer"
    )


def test_the_former_names_of_options_are_read(tmp_path: Path) -> None:
    """Those of older run folders and of the guides."""
    (tmp_path / "config.yaml").write_text("with_stack: true\ngroup: ours\nmax_grad_norm: 0.5\n")
    config = load_config(["--wait_steps", "3", "--repeat=2"], file=tmp_path / "config.yaml", environment={})
    assert (config.profile_with_stack, config.tracker_group, config.grad_norm) == (True, "ours", 0.5)
    assert (config.profile_wait_steps, config.profile_repeat) == (3, 2)


BASES: tuple[dict[str, Any], ...] = (
    {"packing": True, "rope_scaling": "linear", "rope_factor": 4.0},
    {"train_type": "qlora", "quantization_backend": "bnb"},
    {"train_type": "full"},
    {"train_type": "llama_pro"},
    {"base_precision": "fp8"},
    {"recipe": "preference"},
    {"recipe": "rl"},
    {"recipe": "distill"},
    {"machine": "apple-m2-max-64gb"},
)
VALUES: dict[str, Any] = {
    "preference_loss": "ipo",
    "lora_target_modules": "attention",
    "layers_to_transform": "0",
    "add_tokens": "<a>",
    "modules_to_save": "lm_head",
    "rope_factor": 2.0,
}
"""Values of options for which any other value of the type is none."""
KINDS = {
    OnResume.ADAPTER: "trainable",
    OnResume.NEW_BLOCKS: "trainable",
    OnResume.TRAINABLE: "trainable",
    OnResume.ORDER: "order",
    OnResume.QUANTIZATION: "quantization",
    OnResume.OPTIMIZER: "optimizer",
    OnResume.OBJECTIVE: "objective",
}
CHOSEN_BY_MODEL = {"fp8_tolerance"}
"""Options whose effect on the base is known only once it is loaded."""


def identity(plan: Plan) -> dict[str, Any]:
    """Return the identity of a run of ten rows, without its model and data."""
    config = plan.config
    kind = RlRecipe if config.recipe == "rl" else OrderedRecipe
    recipe = kind.__new__(kind)
    recipe.configure(config)
    recipe.train = range(10)
    if config.packing:
        lengths = np.full(10, 5)
        recipe.packed = PackedOrder(lengths, capacity=config.context_length, seed=config.seed)
    return {"order": dict(recipe.order()), **identity_of_options(plan)}


def other_values(option: Option) -> Iterator[Any]:
    if option.name in VALUES:
        yield VALUES[option.name]
    elif option.choices:
        yield from (choice for choice in option.choices if choice != option.default)
    elif option.type is bool:
        yield not option.default
    elif option.type in (int, float):
        yield option.type(max(2 * (option.default or 1), option.low))
        yield option.type((option.default or 1) / 2)


def plan_with(base: dict[str, Any], **changed: Any) -> Plan | None:
    """Return the plan of a request; None if it is refused."""
    asked = {"machine": "h200", **base, **changed}
    try:
        return plan_on(asked.pop("machine"), **asked)
    except UserError:
        return None


def test_what_a_declaration_says_of_a_resume_is_what_a_resume_decides(tmp_path: Path) -> None:
    (tmp_path / "mlx.json").write_text(json.dumps({"num_layers": 4}))
    decided: dict[str, set[str]] = {option.name: set() for option in option_list()}
    for base in BASES:
        before = plan_with(base)
        assert before is not None, base
        was = identity(before)
        for option in option_list():
            if option.name == "recipe" or not option.applies_to(before.config.recipe):
                continue
            values = [str(tmp_path / "mlx.json")] if option.name == "mlx_config" else other_values(option)
            for value in values:
                if (now := plan_with(base, **{option.name: value})) is not None:
                    decided[option.name] |= {found.kind for found in compare(was, identity(now))}
    declared = {o.name: {kind for flag, kind in KINDS.items() if flag in o.on_resume} for o in option_list()}
    wrong = {
        name: (declared[name], decided[name])
        for name in declared.keys() - CHOSEN_BY_MODEL
        if declared[name] != decided[name]
    }
    assert wrong == {}
    options = options_by_name()
    for name, kinds in declared.items():
        said = describe_option(options[name])["on_resume"]
        assert all(kind in said and "rejected" in said for kind in kinds), (name, said)
    for name in ("model_name", "llama_pro_path"):
        assert "--allow_mismatch model" in describe_option(options[name])["on_resume"]
