"""State the types of the fields in a manifest, and find the first that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.core.json_fields import NOTHING, OBJECT, TEXT, Rule, list_of, map_of, real, whole, wrong_field
from crosstune.core.quantization import wrong_spec

_COUNT = whole(0) | NOTHING
_NUMBER = real() | NOTHING


def _by_step(rule: Rule) -> Rule:
    return Rule(
        f"an object with {rule.needs} at each number of a step",
        lambda value: map_of(rule).fits(value) and all(map(_is_step, value)),
    )


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


EVALUATIONS = _by_step(_NUMBER) | NOTHING
"""Step -> evaluation loss; null where it was not finite."""

_REQUIRED = {
    "step": whole(0),
    "engine": TEXT,
    "backend": TEXT,
    "precision": TEXT,
    "quantization": TEXT | NOTHING,
    "identity": OBJECT,
    "trainable": map_of(OBJECT),
    "schedule": OBJECT,
    "data": OBJECT,
    "facts": OBJECT,
    "progress": OBJECT,
    "files": map_of(OBJECT),
}
_OPTIONAL = {
    "created": TEXT | NOTHING,
    "method": TEXT | NOTHING,
    "recipe": TEXT | NOTHING,
    "outside_fp8": list_of(TEXT) | NOTHING,
    "asked": OBJECT | NOTHING,
    "options": OBJECT | NOTHING,
    "metadata": OBJECT | NOTHING,
}
_PARTS: Mapping[str, Mapping[str, Rule]] = {
    "identity": {
        "model": OBJECT,
        "order": OBJECT,
        "eval_data": TEXT | NOTHING,
        "trainable": OBJECT,
        "quantization": OBJECT | NOTHING,
        "optimizer": TEXT,
    },
    "schedule": {"step": _COUNT, "num_steps": _COUNT},
    "data": {"rows_done": _COUNT},
    "facts": {"loss_scale": OBJECT | NOTHING},
    "progress": {
        "steps": whole(0),
        "tokens": whole(0),
        "supervised_tokens": whole(0),
        "skipped": whole(0),
        "first_loss": _NUMBER,
        "final_loss": _NUMBER,
        "seconds": real(0),
        "wall_s": real(0),
        "peak_memory_bytes": whole(0),
        "eval_before": map_of(_NUMBER) | NOTHING,
        "evaluations": EVALUATIONS,
        "eval_metrics": _by_step(map_of(_NUMBER)) | NOTHING,
    },
    "options": {"batch_size": whole(1) | NOTHING, "world_size": whole(-1) | NOTHING},
}
_MODEL = {"name": TEXT | NOTHING, "identity": TEXT | NOTHING, "config": TEXT | NOTHING}
_ORDER = {"rows_per_step": whole(1) | NOTHING}
_LOSS_SCALE = {"factor": real(0), "good_steps": whole(0)}


def wrong_manifest(manifest: Mapping[str, Any]) -> str | None:
    """Return a sentence about the first field that is missing or has another type; None when all are right."""
    wrong = wrong_field(manifest, _REQUIRED | _OPTIONAL, required=tuple(_REQUIRED))
    for part, rules in _PARTS.items():
        wrong = wrong or wrong_field(manifest.get(part) or {}, rules, place=f"{part}.")
    return wrong or _wrong_inner(manifest)


def _wrong_inner(manifest: Mapping[str, Any]) -> str | None:
    identity, scale = manifest["identity"], manifest["facts"].get("loss_scale")
    wrong = None
    if "model" in identity:
        wrong = wrong_field(identity["model"], _MODEL, required=("identity",), place="identity.model.")
    wrong = wrong or wrong_field(identity.get("order") or {}, _ORDER, place="identity.order.")
    if scale:
        wrong = wrong or wrong_field(
            scale, _LOSS_SCALE, required=tuple(_LOSS_SCALE), place="facts.loss_scale."
        )
    return wrong or wrong_spec(identity.get("quantization"))
