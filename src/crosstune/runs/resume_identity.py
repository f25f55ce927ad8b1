"""Decide if a checkpoint may be resumed: build the identity of a run, compare it with the checkpoint's, raise on differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.checkpoint.manifest import Manifest
from crosstune.config.conditions import parse_losses
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.option import OnResume
from crosstune.config.options.run import MISMATCHES, mismatches
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config, option_list, options_by_name, options_on_resume
from crosstune.core.errors import UserError
from crosstune.core.protocols import HasEvaluationData, Recipe
from crosstune.core.quantization import QuantSpec, read_spec, same_quantization
from crosstune.models.identity import read_record, recorded_sha256, source_identity
from crosstune.models.locate import ModelFolder

# Optimizers with the same moments.
_FAMILIES = {"fused_adamw": "adamw", "fused_adam": "adam", "paged_adamw_8bit": "adamw_8bit"}
_SETTINGS = {"lora": OnResume.ADAPTER, "dora": OnResume.ADAPTER, "llama_pro": OnResume.NEW_BLOCKS}
"""Method -> kind of the options that determine the meaning of its weights."""
_ALWAYS = ("lora_alpha", "lora_rank", "lora_target_modules", "use_rslora", "num_new_blocks")
"""Options that every checkpoint records. Older checkpoints lack the others: recorded if they differ from the default."""
_TITLES = {"data": "training data", "eval_data": "evaluation data"}


@dataclass(frozen=True)
class Difference:
    """A difference between a request and a checkpoint."""

    kind: str
    what: str
    was: Any
    now: Any

    def sentence(self) -> str:
        return f"{self.what}: {_short(self.was)} in the checkpoint, {_short(self.now)} now"


def identity_of(plan: Plan, model: ModelFolder | None, recipe: Recipe) -> dict[str, Any]:
    """Return the identity of a run, compared part by part when it is resumed."""
    base = {"name": plan.config.recipe, "identity": "the recipe's own"}
    if model is not None:
        source = source_identity(model.path)
        base = {"name": plan.config.model_name, "identity": source["weights"], "config": source["config"]}
    return {
        "model": base,
        "data": recipe.identity(),
        "eval_data": recipe.eval_identity() if isinstance(recipe, HasEvaluationData) else None,
        "order": dict(recipe.order()),
        **identity_of_options(plan),
    }


def identity_of_options(plan: Plan) -> dict[str, Any]:
    """Return the parts of the identity that need neither the model nor the data.

    The options that they depend on declare it in `on_resume`.
    """
    config, objective = plan.config, dict[str, Any]()
    if config.recipe == "preference":
        objective = {"objective": parse_losses(config.preference_loss)}
    if config.recipe == "distill":
        names = ("distill_loss", "distill_temperature", "teacher_top_k", "ce_weight", "on_policy_share")
        objective = {"objective": {name: getattr(config, name) for name in names}}
    return {
        "quantization": plan.quant_spec.to_json() if plan.quant_spec is not None else None,
        "trainable": settings_of(plan),
        "optimizer": plan.config.optimizer,
    } | objective


def base_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of plan.json and `Manifest.base` that are known once the model is open."""
    if plan.base is None:
        return {}
    groups = plan.base.outside_fp8
    return {"outside_fp8": list(groups) if groups is not None else None}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return the options that determine the meaning of the trained weights."""
    declaration = _SETTINGS.get(plan.method)
    names = {
        "add_tokens",
        "rope_scaling",
        "rope_factor",
        *(options_on_resume(declaration) if declaration is not None else ()),
    }
    defaults = options_by_name()
    settings = {"method": plan.method} | {
        name: value
        for name in sorted(names)
        if (value := getattr(plan.config, name)) != defaults[name].default or name in _ALWAYS
    }
    layers = read_mlx_settings(plan.config.mlx_config).num_layers if plan.method in ("lora", "dora") else None
    return settings | ({"num_layers": layers} if layers not in (None, -1) else {})


def quantization_name(plan: Plan) -> str | None:
    return plan.quant_spec.name() if plan.quant_spec is not None else None


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between two identities; ignore parts that one of them does not record."""
    found: list[Difference] = []
    for kind in was.keys() & now.keys():
        before, after = was[kind], now[kind]
        if kind == "eval_data" and None in (before, after):
            continue  # one side has no evaluation
        if kind in ("order", "trainable"):
            # A key of one side counts as None on the other. A key that every new run records would refuse all older
            # checkpoints, and so would one that is no longer recorded: record a key only if it differs from the default.
            found += [
                Difference(kind, key, before.get(key), after.get(key))
                for key in sorted({*before, *after})
                if before.get(key) != after.get(key)
            ]
        elif kind == "model":  # the name does not matter
            configs = [before.get("config"), after.get("config")]
            if before["identity"] != after["identity"]:
                found.append(Difference(kind, "model", before, after))
            elif None not in configs and configs[0] != configs[1]:
                found.append(Difference(kind, "config.json of the model", *configs))
        elif _comparable(kind, before) != _comparable(kind, after):
            found.append(Difference(kind, _TITLES.get(kind, kind), before, after))
    return sorted(found, key=lambda difference: MISMATCHES.index(difference.kind))


def _comparable(kind: str, value: Any) -> Any:
    """Reduce an optimizer to its family, and a quantization to the fields that change values."""
    if kind == "quantization":
        spec = read_spec(value)
        return spec.meaning() if spec is not None else None
    return _FAMILIES.get(value, value) if kind == "optimizer" else value


def find_differences(
    plan: Plan, manifest: Manifest, identified: Mapping[str, Any], *, measured: bool
) -> tuple[list[Difference], list[Difference]]:
    """Return the unexpected and the expected differences of a request from a checkpoint."""
    found = compare(manifest.identity, identified)
    moved = manifest.backend != plan.backend.name
    adapted = [difference for difference in found if moved and _is_adapted(difference, measured=measured)]
    return [difference for difference in found if difference not in adapted], adapted


def _is_adapted(difference: Difference, *, measured: bool) -> bool:
    """Return True if a different backend explains the difference: a requantized base with a measured effect, or 8-bit
    moments that become fp32."""
    if difference.kind == "quantization":
        return measured and None not in (difference.was, difference.now)
    families = [_comparable(difference.kind, value) for value in (difference.was, difference.now)]
    return families[0] == f"{families[1]}_8bit"


def check_same(
    differences: Sequence[Difference], manifest: Manifest, config: Config, *, do: str = ""
) -> None:
    """Raise unless every difference is allowed; `do` is advice for a command without --allow_mismatch."""
    allowed = set(mismatches(config.allow_mismatch))
    refused = [difference for difference in differences if difference.kind not in allowed]
    if not refused:
        return
    kinds = {difference.kind for difference in refused}
    why = [difference.sentence() for difference in refused]
    if kinds & {"data", "eval_data"}:
        among = [
            o.name
            for o in option_list()
            if OnResume.MAY_CHANGE_DATA in o.on_resume and o.applies_to(config.recipe)
        ]
        causes = changed_options(manifest, config, among=among)
        why.append(
            "possible cause: " + ("; ".join(c.sentence() for c in causes) or "its files or the tokenizer")
        )
    if "lora_rank" in {difference.what for difference in refused}:  # the shapes differ
        do = do or "continue with its rank, or start a new run with a different --name"
    raise UserError(
        "The request does not match the checkpoint.",
        why="; ".join(why),
        do=do
        or f"continue with its options, or add --allow_mismatch {','.join(sorted(kinds | allowed))} to continue anyway",
    )


def changed_options(
    manifest: Manifest, config: Config, *, among: Collection[str] | None = None
) -> list[Difference]:
    """Return the changed options, by default all that affect the training."""
    was, now = manifest.options, config.options()
    if among is None:
        among = now.keys() - options_on_resume(OnResume.FREE, OnResume.ONE_START)
    return [
        Difference("option", name, was[name], now[name])
        for name in now
        if name in among and name in was and was[name] != now[name]
    ]


def check_adapter_base(adapter: Path, *, identity: str, quantization: QuantSpec | None) -> list[str]:
    """Raise if an adapter was trained on a different base; return a warning if the base is quantized differently.

    Adapters of other tools have no record to check. The unquantized layers are not compared: a new run chooses them.
    """
    record = read_record(adapter)
    if not record.get("base"):
        return []
    do = f"use --model_name {record['base'].get('name')}, or remove --base_adapter"
    if (error := different_base(adapter, record, identity, do=do)) is not None:
        raise error
    specs = [
        replace(spec, kept=()) if spec is not None else None
        for spec in (read_spec(record.get("quantization")), quantization)
    ]
    if same_quantization(*specs):
        return []
    descriptions = [spec.describe() if spec is not None else "not quantized" for spec in specs]
    return [f"base_adapter: its base was {descriptions[0]} in training and is {descriptions[1]} now"]


def different_base(
    adapter: Path, record: Mapping[str, Any], identity: str, *, do: str, base: str = "this base"
) -> UserError | None:
    """Return the error for an adapter whose record has a different base; None if it matches or is not recorded."""
    recorded = recorded_sha256(record)
    if recorded in (None, identity):
        return None
    return UserError(
        f"The adapter {adapter} was trained on a different base.",
        why=f"it was trained on {record['base'].get('name')} ({recorded[:12]}); {base} has the identity {identity[:12]}.",
        do=do,
    )


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value and "identity" in value:
        return f"{value['name']} ({str(value['identity'])[:12]})"
    if isinstance(value, Mapping) and "bits" in value:
        return QuantSpec.from_json(value).describe()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    text = str(value)
    return text[:12] if len(text) == 64 else text
