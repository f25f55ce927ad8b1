"""A model folder from one quantization to another: from its original weights where they are found, else through the
dense values of the quantized ones. The error is measured either way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.logit_distance import compare
from crosstune.core.protocols import Observer
from crosstune.core.quantization import QuantSpec
from crosstune.core.record import write_json
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import FolderQuantization, read_quantization
from crosstune.models.staged import check_out, staged
from crosstune.results.export import Form, export
from crosstune.results.merge import RECORD, Request, show_bytes, stored_word
from crosstune.results.mlx_convert import (
    MlxForm,
    check_held,
    convert_adapter,
    convert_by_mlx,
    default_out,
    facts_of,
    from_or_to_mlx,
    holds_adapter,
)
from crosstune.results.original_model import (
    NOT_THE_ORIGINAL,
    choose_original,
    not_the_original,
    original_record,
)
from crosstune.results.trained_folder import Trained
from crosstune.results.verify import Opened, find_quantizer, folder_logits, open_trained
from crosstune.runs.open_parts import weights_identity

if TYPE_CHECKING:
    from crosstune.torch_engine.convert import Conversion


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    model: str
    to: str
    held: str | None = None
    """What the user says the folder holds; None takes what it does hold."""
    bits: int = 4
    group_size: int = 64
    kind: str = "auto"
    double: bool = True
    dtype: str = "auto"
    original: str | None = None
    """A folder; `none` to go through the quantized weights even where the original ones are known."""
    out: Path | None = None
    force: bool = False
    backend: str = "auto"


def convert(request: ConvertRequest, *, observer: Observer) -> dict[str, Any]:
    if holds_adapter(request.model):
        return convert_adapter(request.model, to=request.to, out=request.out, base=request.original)
    if request.to == "peft":
        raise UserError("--to peft is for adapters.", why=f"{request.model} is not an adapter folder.")
    if from_or_to_mlx(request.model, request.to):
        check_held(request.model, request.held)
        return convert_by_mlx(
            request.model,
            MlxForm(to=request.to, bits=request.bits, group_size=request.group_size, dtype=request.dtype),
            original=request.original,
            force=request.force,
            out=request.out,
            observer=observer,
        )
    opened = open_trained(Trained(base=request.model, home=None), backend=request.backend, observer=observer)
    path = opened.model.path
    held = read_quantization(path)
    _check_held(request, path, held)
    if request.to == "mlx":
        return _to_mlx(request, opened, held, observer)
    spec = _target_spec(request, held, path)
    if spec is not None:
        opened = find_quantizer(opened, spec)
    original = choose_original(request.original, opened.model, held, force=request.force)
    start = original or path
    dtype = request.dtype if request.dtype != "auto" else stored_word(start)
    out = request.out or _default_out(opened.model, request)
    check_out(out)
    conversion = _make(opened, start, spec, dtype, replaces=held is not None and original is not None)
    with staged(out, need_bytes=conversion.result_bytes()) as stage:
        record = original_record(opened.model, held, original)
        on_read = show_bytes(observer, "convert", request.model)
        conversion.write(stage.result, tokenizer=path, original=record, on_read=on_read)
        report = _measure(opened, conversion, stage.result, held, original)
        _check_original(request, report)
        report["source_identity"] = weights_identity(start)
        report |= {"from": held.spec.quantizer if held else "none", "to": request.to, "dtype": dtype}
        write_json(stage.result / RECORD, {"converted": report})
    return report | {"path": str(out)}


def _make(opened: Opened, start: Path, spec: QuantSpec | None, dtype: str, *, replaces: bool) -> Conversion:
    from crosstune.torch_engine.convert import Conversion
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.merge import DTYPES, Base
    from crosstune.torch_engine.prequantized import read_prequantized

    base = Base(folder=start, device=open_device(opened.plan.backend))
    before = read_prequantized(opened.model.path) if replaces else None
    return Conversion(start=base, spec=spec, dtype=DTYPES[dtype], before=before)


def _measure(
    opened: Opened,
    conversion: Conversion,
    folder: Path,
    held: FolderQuantization | None,
    original: Path | None,
) -> dict[str, Any]:
    """Against the original weights where there are some, else against those of the folder that was converted."""

    reference = original or opened.model.path
    expected = folder_logits(reference, opened)
    report: dict[str, Any] = {
        "started_from": "original" if held is None or original is not None else "dequantized",
        "reference": str(reference),
        "weights": {"after": conversion.target_errors.to_json()},
        "logits": {"after": compare(expected, folder_logits(folder, opened)).to_json()},
    }
    if conversion.before is not None:
        report["weights"]["before"] = conversion.before_errors.to_json()
        report["logits"]["before"] = compare(expected, folder_logits(opened.model.path, opened)).to_json()
    return report


def _check_held(request: ConvertRequest, path: Path, held: FolderQuantization | None) -> None:
    found = held.spec.quantizer if held is not None else "none"
    if request.held not in (None, found):
        words = "plain weights" if held is None else f"{found} weights of {held.spec.bits} bits"
        raise UserError(
            f"{path} does not hold what --from {request.held} says.",
            why=f"it holds {words}.",
            do=f"use --from {found}, or name another folder",
        )


def _target_spec(request: ConvertRequest, held: FolderQuantization | None, path: Path) -> QuantSpec | None:
    from crosstune.torch_engine.quantized import open_quantizer

    if request.to in ("none", "hf"):
        if held is None:
            raise UserError(f"{path} holds plain weights already.", do="use crosstune export to copy it")
        return None
    spec = QuantSpec(
        quantizer=request.to,
        bits=request.bits,
        group_size=request.group_size,
        kind=request.kind,
        double=request.double,
    )
    open_quantizer(spec)
    if held is not None and spec.meaning() == held.spec.meaning():
        raise UserError(
            f"{path} is quantized in exactly that way already.", do="ask for other bits or groups"
        )
    return spec


def _check_original(request: ConvertRequest, report: Mapping[str, Any]) -> None:
    before = report["weights"].get("before")
    if before is not None and before["relative"] >= NOT_THE_ORIGINAL and not request.force:
        why = f"the quantized weights are {before['relative']:.2f} away from them (relative)."
        raise not_the_original(request.original or report["reference"], request.model, why=why)


def _to_mlx(
    request: ConvertRequest, opened: Opened, held: FolderQuantization | None, observer: Observer
) -> dict[str, Any]:
    from crosstune.torch_engine.convert import errors_of
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.merge import Base
    from crosstune.torch_engine.prequantized import read_prequantized

    model = opened.model
    original = choose_original(request.original, model, held, force=request.force)
    facts = facts_of(request.model, held, original, reference=original or model.path)
    if original is not None:
        before = read_prequantized(model.path)
        assert before is not None
        errors = errors_of(before, Base(folder=original, device=open_device(opened.plan.backend)))
        _check_original(request, facts | {"weights": {"before": errors.to_json()}})
        agreement = compare(folder_logits(original, opened), folder_logits(model.path, opened))
        facts["before"] = {"weights": errors.relative, "agreement": agreement.to_json()}
    form = Form(to="mlx", bits=request.bits, group_size=request.group_size)
    asked = Request(
        target=str(original or request.model),
        out=request.out or default_out(model, form.word),
        dtype=request.dtype,
        backend=request.backend,
    )
    return export(asked, form, observer=observer, facts=facts)


def _default_out(model: ModelFolder, request: ConvertRequest) -> Path:
    word = "plain" if request.to in ("none", "hf") else f"{request.to}-{request.bits}bit"
    return default_out(model, word)
