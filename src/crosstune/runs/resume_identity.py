"""Decide what counts as the same training: build a run's identity, compare it with a checkpoint's, refuse differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.checkpoint.manifest import Manifest
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.option import OnResume
from crosstune.config.options.run import MISMATCHES, mismatches
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config, options_on_resume
from crosstune.core.errors import UserError
from crosstune.core.protocols import HasEvaluationData, Recipe
from crosstune.core.quantization import QuantSpec, read_spec, same_meaning
from crosstune.models.identity import read_record, recorded_sha256, source_identity
from crosstune.models.locate import ModelFolder

# Optimizers with the same moments.
_FAMILIES = {"fused_adamw": "adamw", "fused_adam": "adam", "paged_adamw_8bit": "adamw_8bit"}
_SETTINGS = {"lora": OnResume.ADAPTER, "dora": OnResume.ADAPTER, "llama_pro": OnResume.NEW_BLOCKS}
"""Method -> kind of the options that determine the meaning of its weights."""
_TITLES = {"data": "training data", "eval_data": "evaluation data"}


@dataclass(frozen=True)
class Difference:
    """A difference between a request and the training of a checkpoint."""

    kind: str
    what: str
    was: Any
    now: Any

    def sentence(self) -> str:
        return f"{self.what}: {_short(self.was)} in the checkpoint, {_short(self.now)} now"


def identity_of(plan: Plan, model: ModelFolder | None, recipe: Recipe) -> dict[str, Any]:
    """Return the identity of a training, compared part by part when a run is resumed. A recipe's own model is identified
    by the name of the recipe."""
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
    """Return the parts of the identity that need neither the model nor the data."""
    return {
        "quantization": plan.quant_spec.to_json() if plan.quant_spec is not None else None,
        "trainable": settings_of(plan),
        "optimizer": plan.config.optimizer,
    }


def base_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of plan.json and `Manifest.base` that are known once the model is open."""
    if plan.base is None:
        return {}
    groups = plan.base.outside_fp8
    return {"outside_fp8": list(groups) if groups is not None else None}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return the options that determine the meaning of the trained weights."""
    declaration = _SETTINGS.get(plan.method)
    names = options_on_resume(declaration) if declaration is not None else ()
    settings = {"method": plan.method, **{name: getattr(plan.config, name) for name in sorted(names)}}
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
            found += [
                Difference(kind, key, before.get(key), after.get(key))
                for key in sorted({*before, *after})
                if before.get(key) != after.get(key)
            ]
        elif kind == "model":
            found += _compare_models(before, after)
        elif _comparable(kind, before) != _comparable(kind, after):
            found.append(Difference(kind, _TITLES.get(kind, kind), before, after))
    return sorted(found, key=lambda difference: MISMATCHES.index(difference.kind))


def _compare_models(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Compare weights and configuration of two models, but not their names."""
    if was["identity"] != now["identity"]:
        return [Difference("model", "model", was, now)]
    before, after = was.get("config"), now.get("config")
    if before is None or after is None or before == after:
        return []
    return [Difference("model", "config.json of the model", before, after)]


def _comparable(kind: str, value: Any) -> Any:
    """Return the value to compare: the family of an optimizer, the fields of a quantization that change values."""
    if kind == "quantization":
        spec = read_spec(value)
        return spec.meaning() if spec is not None else None
    return _FAMILIES.get(value, value) if kind == "optimizer" else value


def find_differences(
    plan: Plan, manifest: Manifest, identified: Mapping[str, Any], *, measured: bool
) -> tuple[list[Difference], list[Difference]]:
    """Return the unexpected and the expected differences of a request from the training of a checkpoint."""
    found = compare(manifest.identity, identified)
    moved = manifest.backend != plan.backend.name
    adapted = [difference for difference in found if moved and _is_adapted(difference, measured=measured)]
    others = [difference for difference in found if difference not in adapted]
    return explain_data(others, manifest, plan.config), adapted


def _is_adapted(difference: Difference, *, measured: bool) -> bool:
    """Return whether a difference is expected on another backend: a requantized base with a measured effect, or 8-bit
    Adam moments that become fp32."""
    if difference.kind == "quantization":
        return measured and None not in (difference.was, difference.now)
    families = [_comparable(difference.kind, value) for value in (difference.was, difference.now)]
    return families == ["adamw_8bit", "adamw"]


def explain_data(differences: Sequence[Difference], manifest: Manifest, config: Config) -> list[Difference]:
    """Name the changed options that may explain other training data, instead of its hashes."""
    was, now = manifest.options, config.options()
    dividing = options_on_resume(OnResume.MAY_CHANGE_DATA)
    changed = [name for name in now if name in dividing and name in was and was[name] != now[name]]
    if not changed or not any(difference.kind == "data" for difference in differences):
        return list(differences)
    found = [d for d in differences if d.kind != "data"]
    return found + [Difference("data", name, was[name], now[name]) for name in changed]


def check_same(differences: Sequence[Difference], config: Config, *, do: str = "") -> None:
    """Raise unless every difference was allowed; `do` is advice for a command without --allow_mismatch."""
    allowed = set(mismatches(config.allow_mismatch))
    refused = [difference for difference in differences if difference.kind not in allowed]
    if refused:
        kinds = ",".join(sorted({difference.kind for difference in refused} | allowed))
        raise UserError(
            "The checkpoint is from another training.",
            why="; ".join(difference.sentence() for difference in refused),
            do=do or f"continue with its options, or add --allow_mismatch {kinds} to continue anyway",
        )


def changed_options(manifest: Manifest, config: Config) -> list[Difference]:
    """Return the changed options that affect the training."""
    was, now = manifest.options, config.options()
    unreported = options_on_resume(OnResume.FREE, OnResume.ONE_START)
    return [
        Difference("option", name, was[name], now[name])
        for name in now
        if name in was and name not in unreported and was[name] != now[name]
    ]


def check_base(adapter: Path, *, identity: str, quantization: QuantSpec | None) -> list[str]:
    """Raise if an adapter was trained on another base; return a warning if the base is quantized differently.

    Adapters of other tools have no record to check. The names of unquantized layers are not compared: a new training
    chooses them when it is opened.
    """
    record = read_record(adapter)
    base = record.get("base") or {}
    recorded = recorded_sha256(record)
    if not base:
        return []
    if recorded not in (None, identity):
        raise UserError(
            f"The adapter {adapter} was trained on another base.",
            why=f"it was trained on {base.get('name')} with the identity {recorded[:12]}; this model has {identity[:12]}.",
            do=f"use --model_name {base.get('name')}, or leave --base_adapter out",
        )
    specs = [
        replace(spec, kept=()) if spec is not None else None
        for spec in (read_spec(record.get("quantization")), quantization)
    ]
    if same_meaning(*specs):
        return []
    descriptions = [spec.describe() if spec is not None else "not quantized" for spec in specs]
    return [f"base_adapter: its base was {descriptions[0]} in training and is {descriptions[1]} now"]


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value and "identity" in value:
        return f"{value['name']} ({str(value['identity'])[:12]})"
    if isinstance(value, Mapping) and "bits" in value:
        return QuantSpec.from_json(value).describe()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    text = str(value)
    return text[:12] if len(text) == 64 else text
