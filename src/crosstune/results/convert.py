"""Convert a model folder to a different quantization, or an adapter to a different layout, and measure the error."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.logit_distance import Logits, check_finite, measure_agreement
from crosstune.core.model_folders import PLAIN_BITS, Rewrite, WeightForm
from crosstune.files.json_files import write_json
from crosstune.models import mlx_adapters
from crosstune.models.adapter_files import read_settings
from crosstune.models.identity import RECORD, source_record
from crosstune.models.locate import ModelFolder, find_local
from crosstune.models.quantized_folder import FolderQuantization, read_quantization, stored_format
from crosstune.models.staged import Unverified, check_out, staged
from crosstune.models.weights import read_arrays
from crosstune.results.export import export
from crosstune.results.opened import (
    NOT_THE_ORIGINAL,
    Form,
    Opened,
    Request,
    check_for_mlx,
    choose_original,
    find_quantizer,
    has_torch,
    not_the_original,
    open_engine,
    open_trained,
    original_record,
    read_logits,
    show_bytes,
)
from crosstune.results.verify import make_prompts, refuse_unverified, report_agreement
from crosstune.runs.trained_folder import Trained

_PLAIN = ("none", "hf")
_ADAPTER_BYTES = 50_000_000
"""Disk space for a converted adapter."""


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    model: str
    to: str
    held: str | None = None
    """The quantizer of --from; None skips the check."""
    bits: int = 4
    group_size: int = 64
    kind: str = "auto"
    double: bool = True
    dtype: str = "auto"
    original: str | None = None
    """A folder; `none` starts from the dequantized weights even if the original weights are known."""
    out: Path | None = None
    force: bool = False
    backend: str = "auto"

    def form(self) -> WeightForm:
        """Return the weight format of the result."""
        if self.to in _PLAIN:
            return WeightForm(quantizer="none", dtype=self.dtype)
        form = WeightForm(quantizer=self.to, bits=self.bits, group_size=self.group_size, dtype=self.dtype)
        is_mlx = self.to == "mlx"  # without kinds and double quantization
        return replace(form, double=self.double and not is_mlx, kind="auto" if is_mlx else self.kind)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The folder to convert, its quantization, and its original weights if they are found."""

    opened: Opened
    held: FolderQuantization | None
    original: Path | None

    @property
    def model(self) -> ModelFolder:
        return self.opened.model

    @property
    def start(self) -> Path:
        return self.original or self.model.path

    @property
    def quantizer(self) -> str:
        return self.held.spec.quantizer if self.held is not None else "none"

    def facts(self, request: ConvertRequest) -> dict[str, Any]:
        """Return the report on the source."""
        return {
            "model": request.model,
            "from": self.quantizer,
            "started_from": "original" if self.held is None or self.original else "dequantized",
            "reference": str(self.start),
        }


def convert(request: ConvertRequest, *, observer: Observer) -> dict[str, Any]:
    """Convert a model or adapter folder, and return a report."""
    if request.out is not None:
        check_out(request.out)
    if mlx_adapters.adapter_form(Path(request.model).expanduser()) is not None:
        return _convert_adapter(request.model, to=request.to, out=request.out, base=request.original)
    if request.to == "peft":
        raise UserError("--to peft is for adapters.", why=f"{request.model} is not an adapter folder.")
    source, form = _open_source(request, observer), request.form()
    out = request.out or _default_out(source.model, form)
    check_out(out)
    if form.quantizer == "mlx" and source.opened.engine.own_quantizer != "mlx":
        return _export_to_mlx(request, source, out, observer)
    return _rewrite(request, source, out, observer)


def _convert_adapter(target: str, *, to: str, out: Path | None, base: str | None) -> dict[str, Any]:
    """Write the adapter in the other layout, and check that converting it back is exact."""
    source = Path(target).expanduser().absolute()
    form = mlx_adapters.adapter_form(source)
    if to not in ("mlx", "peft") or form == to:
        raise UserError(
            f"{source} cannot be converted to {to}.",
            why=f"it is an adapter in the {form} layout.",
            do=f"use --to {'peft' if form == 'mlx' else 'mlx'}, or crosstune merge to merge it into its base model",
        )
    warnings = _check_base_for_mlx(source, base) if to == "mlx" else []
    out = out or source.with_name(f"{source.name}-{to}")
    with staged(out, need_bytes=_ADAPTER_BYTES) as stage:
        write, undo = mlx_adapters.to_peft, mlx_adapters.to_mlx
        if to == "mlx":
            write, undo = undo, write
        write(source, stage.result, base=base)
        undo(stage.result, stage.scratch / "back")
        name = mlx_adapters.MLX_WEIGHTS if to == "peft" else mlx_adapters.PEFT_WEIGHTS
        before, after = (
            {key: (dtype, array.tobytes()) for key, (dtype, array) in read_arrays(folder / name).items()}
            for folder in (source, stage.scratch / "back")
        )
        if before != after:
            raise Unverified(f"Converting the adapter {source} back is not exact.", do="report it as a bug")
    facts = {"adapter": str(source), "to": to, "exact": True, "num_matrices": len(before), "path": str(out)}
    return facts | {"warnings": warnings}


def _check_base_for_mlx(adapter: Path, base: str | None) -> list[str]:
    """Raise if mlx-lm computes the base model differently from transformers; return warnings. Download nothing."""
    base = base or read_settings(adapter).get("base_model_name_or_path") or "the base model"
    model = None
    with contextlib.suppress(UserError):
        model = find_local(base, cache=cache_override())
    if model is None or importlib.util.find_spec("mlx_lm") is None:
        missing = "mlx-lm is not installed" if model is not None else f"{base} was not found on this machine"
        return [f"whether mlx-lm computes the base model as transformers does was not checked: {missing}"]
    if read_quantization(model.path) is not None:  # only MLX reads its own, and the adapter was trained on it
        return []
    return check_for_mlx(str(adapter), model.path, make_prompts(model.path))


def _rewrite(request: ConvertRequest, source: _Source, out: Path, observer: Observer) -> dict[str, Any]:
    """Write the folder with the engine that reads it, and measure the result."""
    opened, form, engine = source.opened, request.form(), source.opened.engine
    replaced = source.model.path if source.held is not None and source.original is not None else None
    record = original_record(source.model, source.held, source.original)
    rewrite = Rewrite(
        source=source.start, form=form, tokenizer=source.model.path, replaced=replaced, original=record
    )
    with staged(out, need_bytes=engine.result_bytes(rewrite)) as stage:
        reference = engine.readable(source.start, view=stage.scratch / "reference")
        _check_original(request, source)
        expected = check_finite(read_logits(reference, opened), str(source.start))
        on_bytes = show_bytes(observer, "convert", request.model)
        written = engine.rewrite_folder(stage.result, rewrite, scratch=stage.scratch, on_bytes=on_bytes)
        report = source.facts(request) | {"to": request.to, "dtype": stored_format(stage.result)}
        if written.errors is not None:
            found = read_logits(stage.result, opened)
            report |= {"weights": written.errors, "logits": measure_agreement(expected, found).to_json()}
        else:
            report |= _judge_result(opened, form, expected, stage.result) | {"warnings": written.warnings}
        report |= source_record(source.start, result=stage.result) | {"original": record}
        write_json(stage.result / RECORD, {"converted": report})
        if "verified" in report:
            refuse_unverified(report, out)
    return report | {"path": str(out)}


def _export_to_mlx(request: ConvertRequest, source: _Source, out: Path, observer: Observer) -> dict[str, Any]:
    """Export a folder that torch reads to MLX, and compare the logits of both engines."""
    _check_original(request, source)
    asked = Request(
        target=str(source.original or request.model), out=out, dtype=request.dtype, backend=request.backend
    )
    form = Form(to="mlx", bits=request.bits, group_size=request.group_size)
    return export(asked, form, observer=observer, facts=source.facts(request))


def _open_source(request: ConvertRequest, observer: Observer) -> _Source:
    """Open the folder with the engine that can read it, and check the request."""
    form, name = request.form(), _choose_engine(request)
    if form.quantizer == "mlx":
        open_engine("mlx").check_form(form)
    trained = Trained(base=request.model, home=None)
    opened = open_trained(trained, engine=name, backend=request.backend, observer=observer)
    path = opened.model.path
    held = read_quantization(path)
    found = held.spec.quantizer if held is not None else "none"
    if request.held not in (None, found):
        raise UserError(
            f"{path} does not match --from {request.held}.",
            why="its weights are dense." if held is None else f"it has {held.spec.bits}-bit {found} weights.",
            do=f"use --from {found}, or a different folder",
        )
    if held is None and form.quantizer == "none":
        raise UserError(f"{path} already has dense weights.", do="use crosstune export to copy it")
    if form.quantizer != "mlx":
        opened.engine.check_form(form)
    if held is not None and form.spec().meaning() == held.spec.meaning():
        raise UserError(
            f"{path} is already quantized in exactly this way.",
            do="choose different bits or a different group size",
        )
    if form.quantizer not in ("none", "mlx"):
        opened = find_quantizer(opened, form.spec())
    original = choose_original(request.original, opened.model, held, force=request.force)
    return _Source(opened=opened, held=held, original=original)


def _choose_engine(request: ConvertRequest) -> str:
    """Return mlx for weights quantized by MLX, and for dense weights if torch is missing; otherwise torch."""
    folder = Path(request.model).expanduser()
    held = read_quantization(folder) if (folder / "config.json").is_file() else None
    if held is None or held.spec.quantizer != "mlx":
        return "mlx" if request.to == "mlx" and not has_torch() else "torch"
    if request.to not in (*_PLAIN, "mlx"):
        raise UserError(
            f"{request.model} cannot be converted to {request.to} in one step.",
            why="its weights are quantized by MLX, and only MLX can read them.",
            do=f"dequantize it first: crosstune convert {shlex.quote(request.model)} --to hf",
        )
    return "mlx"


def _check_original(request: ConvertRequest, source: _Source) -> None:
    """Raise if the quantized weights are unrelated to those of --original. Not every engine can read both."""
    engine, held, original = source.opened.engine, source.held, source.original
    if request.original is None or request.force or original is None or held is None:
        return
    if engine.own_quantizer in (None, held.spec.quantizer):
        errors = engine.weight_errors(source.model.path, original)
        if errors["relative"] >= NOT_THE_ORIGINAL:
            why = f"the quantized weights differ by {errors['relative']:.2f} (relative) from them."
            raise not_the_original(original, request.model, why=why)


def _judge_result(opened: Opened, form: WeightForm, expected: Logits, folder: Path) -> dict[str, Any]:
    """Compare a folder that MLX wrote with its source; transformers reads dense weights if torch is installed."""
    is_dense = form.quantizer == "none"
    checker = open_engine("torch") if is_dense and has_torch() else opened.engine
    agreement = measure_agreement(expected, checker.logits(folder, opened.prompts))
    report: dict[str, Any] = {"checked_by": checker.reader}
    if is_dense:
        return report | report_agreement(agreement, stored_format(folder), "fp32")
    bits = str(form.bits) if form.bits != PLAIN_BITS else "bf16"
    return report | {"n_bits": form.bits} | report_agreement(agreement, bits)


def _default_out(model: ModelFolder, form: WeightForm) -> Path:
    """Return a folder next to the model folder, or in the current folder if the model is not a folder."""
    if model.source == "folder":
        return model.path.with_name(f"{model.path.name}-{form.name}")
    return Path(f"{Path(model.name).name.removesuffix('.gguf')}-{form.name}").absolute()
