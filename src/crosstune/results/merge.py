"""Merge an adapter into dense weights, and compare the result with the trained model."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Preparing
from crosstune.core.logit_distance import Logits, check_finite, measure_agreement
from crosstune.core.model_folders import AdapterFolder, DenseWeights
from crosstune.files.json_files import write_json
from crosstune.models.adapter_files import copy_template, replace_tokenizer
from crosstune.models.identity import RECORD
from crosstune.models.quantized_folder import (
    FolderQuantization,
    dense_bytes,
    read_quantization,
    stored_format,
)
from crosstune.models.staged import check_out, staged
from crosstune.results.opened import Opened, Request, find_original, open_adapter, open_request, show_bytes
from crosstune.results.verify import chat_problems, largest_difference, refuse_unverified, report_agreement

_INTO = ("original", "dequantized")
_FAR_FROM_TRAINED = 0.1
"""Relative difference of logits that is too large for rounding to 16 bits."""
_MUCH_ROUNDING = 0.2
"""Share of a training's change of the logits."""


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """A dense model folder with its expected logits and a report."""

    folder: Path
    expected: Logits
    report: dict[str, Any] = field(default_factory=dict)
    """Has `agreement` once the logits have been compared."""


def merge(request: Request, *, observer: Observer) -> dict[str, Any]:
    """Write a merged model folder and return a report."""
    if request.out is not None:
        check_out(request.out)
    opened, warnings = open_request(request, observer)
    trained = opened.trained
    if trained.adapter is None:
        how = f" (trained with {trained.method})" if trained.method else ""
        raise UserError(
            f"There is nothing to merge in {trained.home or trained.base}.",
            why=f"it is a whole model{how}, not an adapter.",
            do="use the model folder itself, or crosstune export",
        )
    out = request.out or opened.trained.result_path("merged")
    with staged(out, need_bytes=dense_bytes(opened.model.path, request.dtype)) as stage:
        report = merge_into(stage.result, opened, request, observer).report
        report["warnings"] = [*warnings, *report.get("warnings", ())]
        write_json(stage.result / RECORD, {"merged": report})
        problems = chat_problems(opened.tokenizer_folder, stage.result)
        refuse_unverified(report | {"problems": problems}, out)
    return report | {"path": str(out)}


def merge_into(folder: Path, opened: Opened, request: Request, observer: Observer) -> DenseModel:
    """Write the merged model into `folder`, and measure its difference from the trained model."""
    trained, engine = opened.trained, opened.engine
    assert trained.adapter is not None
    choices = _weight_choices(opened, request)
    into = request.into or next(iter(choices))
    engine.check_adapter(choices[into])
    observer.on_event(Preparing(doing="computing the trained model's logits"))
    session = open_adapter(opened)
    wanted = expected = check_finite(session.logits(opened.prompts), str(trained.adapter))
    if into == "original" and trained.quantization is not None:
        session = None
        gc.collect()  # a session has reference cycles, and the next session needs its memory
        session = open_adapter(opened, quantized=False, folder=choices[into].folder)
        expected = session.logits(opened.prompts)
    if not engine.folds_sessions:
        session = None
    on_bytes = show_bytes(observer, "merge", trained.base)
    engine.write_dense(folder, choices[into], session=session, on_bytes=on_bytes)
    session = None
    if opened.tokenizer_folder == trained.adapter:
        replace_tokenizer(trained.adapter, folder)
    else:
        copy_template(trained.adapter, folder)
    stored = stored_format(folder)
    observer.on_event(Preparing(doing="comparing the merged model"))
    others = {name: weights for name, weights in choices.items() if name != into}
    # Modules trained in full may have other shapes.
    if stored in ("bf16", "fp16") and not trained.settings.get("modules_to_save"):
        others["base"] = replace(choices[into], adapter=None)
    own, found = engine.variant_logits(folder, opened.prompts, others)
    report: dict[str, Any] = {
        "adapter": str(trained.adapter),
        "base": trained.base,
        "into": into,
        "dtype": stored,
        "checked_by": engine.reader,
    }
    difference = largest_difference(folder, opened.prompts, expected, own)
    report |= report_agreement(
        measure_agreement(expected, own), opened.precision, stored, difference=difference
    )
    if trained.quantization is not None:
        report |= _report_costs(wanted, {into: own, **found}, into)
    if "base" in found:
        change = measure_agreement(expected, found["base"]).relative
        report["warnings"] = [
            *report.get("warnings", ()),
            *_rounding_warning(report["agreement"]["relative"], change, stored),
        ]
    return DenseModel(folder=folder, expected=expected, report=report)


def _rounding_warning(rounding: float, change: float, stored: str) -> list[str]:
    """Warn if rounding the merged weights undoes much of a small change, as after a short training."""
    if rounding <= _MUCH_ROUNDING * change or not change:
        return []
    keeps = "--dtype fp16 or fp32 keeps" if stored == "bf16" else "--dtype fp32 keeps"
    return [
        f"rounding the merged weights to {stored} changes the logits by {rounding / change:.0%} of the change by training; "
        f"{keeps} more of it"
    ]


def write_expanded(folder: Path, opened: Opened, request: Request, observer: Observer) -> DenseModel:
    """Return a dense model for llama_pro blocks trained on a quantized base: the saved result itself with the original
    weights, or dequantized weights written to `folder`."""
    trained, path = opened.trained, opened.model.path
    seen = DenseWeights(
        folder=path,
        quantization=trained.quantization,
        precision=trained.precision,
        new_blocks=trained.new_blocks,
        dtype=request.dtype,
    )
    exact = replace(seen, dtype="fp32")
    original, found = opened.engine.variant_logits(path, opened.prompts, {"dequantized": exact})
    wanted = check_finite(found["dequantized"], trained.base)
    into = request.into or "original"
    if into == "dequantized" or request.dtype != "auto":
        source = seen if into == "dequantized" else DenseWeights(folder=path, dtype=request.dtype)
        on_bytes = show_bytes(observer, "read", trained.base)
        opened.engine.write_dense(folder, source, on_bytes=on_bytes)
        path = folder
    report = {"model": trained.base, "into": into, "dtype": stored_format(path)}
    report |= _report_costs(wanted, {"original": original}, into)
    expected = wanted if into == "dequantized" else original
    return DenseModel(folder=path, expected=expected, report=report)


def _weight_choices(opened: Opened, request: Request) -> dict[str, DenseWeights]:
    """Return the weights that the adapter can be merged into, by the values of --into."""
    trained, path = opened.trained, opened.model.path
    assert trained.adapter is not None
    adapter = AdapterFolder(path=trained.adapter, settings=trained.settings)
    plain = DenseWeights(folder=path, adapter=adapter, dtype=request.dtype)
    if trained.quantization is None:
        return {"original": plain}
    choices = {"dequantized": replace(plain, quantization=trained.quantization, precision=trained.precision)}
    held = read_quantization(path)
    original = path if held is None else find_original(held.original)
    if original is not None:
        return {"original": replace(plain, folder=original), **choices}
    if request.into == "dequantized" or (request.into is None and is_release(held)):
        return choices
    raise UserError(
        f"The original weights of {path} are not on this machine.",
        why="the adapter was trained on a folder that was already quantized.",
        do="use --into dequantized, or restore the original weights at the recorded path",
    )


def is_release(held: FolderQuantization | None) -> bool:
    """Return True for weights that were published in 4 bits only, so that there are no others to restore."""
    return held is not None and not held.own and held.spec.quantizer == "mxfp4"


def _report_costs(wanted: Logits, found: Mapping[str, Logits], into: str) -> dict[str, Any]:
    """Report the difference of each --into choice from the trained model; warn if the chosen one is far from it."""
    costs = {name: measure_agreement(wanted, found[name]).to_json() for name in _INTO if name in found}
    relative = costs.get(into, {}).get("relative", 0.0)
    if into != "original" or relative <= _FAR_FROM_TRAINED:
        return {"against_trained": costs, "warnings": []}
    warning = (
        f"with the original weights the logits differ by {relative:.2g} (relative) from the trained model; "
        "--into dequantized keeps that model"
    )
    return {"against_trained": costs, "warnings": [warning]}
