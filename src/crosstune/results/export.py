"""What was trained, or any model, in the forms of other tools: written, read back and compared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.events import Observer
from crosstune.core.json_files import write_json
from crosstune.core.logit_distance import Logits, compare
from crosstune.models.quantized_folder import RECORD as QUANTIZATION_RECORD
from crosstune.models.quantized_folder import read_quantization
from crosstune.models.staged import Stage, check_out, staged
from crosstune.results import merge as torch_merge
from crosstune.results import mlx_merge
from crosstune.results.merge import (
    RECORD,
    Request,
    default_out,
    dense_bytes,
    expanded_into,
    merge_into,
    mlx_word,
    open_request,
    show_bytes,
    stored_word,
)
from crosstune.results.original_model import original_record
from crosstune.results.verify import Opened, chat_problems, folder_logits, judge, refuse_unverified
from crosstune.runs.open_parts import weights_identity


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of an export. `bits` and `group_size` are for MLX (16 bits: not quantized), `kind` for GGUF."""

    to: str
    bits: int = 16
    group_size: int = 64
    kind: str = "auto"

    @property
    def word(self) -> str:
        """What a folder of this form is named after."""
        return mlx_word(self.bits) if self.to == "mlx" else self.to


def merge(request: Request, *, observer: Observer) -> dict[str, Any]:
    """Fold an adapter into its base, by the engine that can, and compare."""
    by = mlx_merge if mlx_merge.made_by_mlx(request) else torch_merge
    return by.merge(request, observer=observer)


def export(
    request: Request, form: Form, *, observer: Observer, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write what was trained, or any model, for another tool; reload it and compare. `facts` go into the report."""
    write = {"hf": _write_hf, "mlx": _write_mlx, "gguf": _write_gguf}[form.to]
    if form.to == "mlx":
        from crosstune.mlx_engine.export import check_form

        check_form(bits=form.bits, group_size=form.group_size)
    if form.to != "gguf" and mlx_merge.made_by_mlx(request):
        bits = form.bits if form.to == "mlx" else 16
        return mlx_merge.merge(
            request, observer=observer, word=form.word, bits=bits, group_size=form.group_size
        )
    opened, warnings = open_request(request, observer)
    out = request.out or default_out(opened.trained, form.word)
    check_out(out)
    num_copies = 1 if form.to == "hf" else 2
    with staged(out, need_bytes=num_copies * dense_bytes(opened.model.path, request.dtype)) as stage:
        source, expected, report = _dense_source(stage, opened, request, observer)
        warnings += report.get("warnings", ())
        report |= write(stage, source, opened, expected, form, observer)
        if opened.trained.adapter is None:
            report["source_identity"] = weights_identity(opened.model.path)
        if form.to == "mlx" and opened.trained.adapter is None and opened.trained.quantization is None:
            held = read_quantization(opened.model.path)
            report["original"] = original_record(opened.model, held, None)
        report |= {"to": form.to, "warnings": [*warnings, *report.pop("said", ())], **(facts or {})}
        problems = [
            *report.pop("problems", ()),
            *chat_problems(opened.model.path, report.pop("reread", stage.result)),
        ]
        write_json(stage.result / RECORD, {"exported": report})
        refuse_unverified(report | {"problems": problems}, out)
    return report | {"path": str(out)}


def _dense_source(
    stage: Stage, opened: Opened, request: Request, observer: Observer
) -> tuple[Path, Logits, dict[str, Any]]:
    """A plain folder of what was trained, and the logits it should have."""
    if opened.trained.adapter is not None:
        folder = stage.scratch / "merged"
        report, expected = merge_into(folder, opened, request, observer)
        return folder, expected, report
    if opened.trained.quantization is not None:
        return expanded_into(stage.scratch / "expanded", opened, request, observer)
    folder, expected = opened.model.path, folder_logits(opened.model.path, opened)
    if request.dtype != "auto" or read_quantization(folder) is not None:
        from crosstune.torch_engine import convert
        from crosstune.torch_engine.merge import DTYPES, Base

        base, folder = Base(folder=folder), stage.scratch / "plain"
        on_read = show_bytes(observer, "read", opened.trained.base)
        convert.write_dense(folder, base, dtype=DTYPES.get(request.dtype), on_read=on_read)
    return folder, expected, {"model": opened.trained.base, "dtype": stored_word(folder)}


def _write_hf(
    stage: Stage, source: Path, opened: Opened, expected: Logits, form: Form, observer: Observer
) -> dict[str, Any]:

    if source.is_relative_to(stage.scratch):
        source.rename(stage.result)
    else:
        _copy_model(source, stage.result)
    found = folder_logits(stage.result, opened)
    return judge(compare(expected, found), opened.precision, stored_word(stage.result))


def _write_mlx(
    stage: Stage, source: Path, opened: Opened, expected: Logits, form: Form, observer: Observer
) -> dict[str, Any]:
    from crosstune.mlx_engine.export import convert_folder, folder_logits, make_view

    view = make_view(source, stage.scratch / "view")
    said = convert_folder(view, stage.result, bits=form.bits, group_size=form.group_size)
    found = folder_logits(stage.result, opened.prompts)
    plain = stored_word(source)
    if form.bits == 16:
        return {"n_bits": 16} | judge(compare(expected, found), opened.precision, plain)
    # Few bits explain almost any difference. Without them, what mlx-lm makes of the model shows.
    unquantized = judge(compare(expected, folder_logits(view, opened.prompts)), opened.precision, plain)
    problems = (
        [] if unquantized["verified"] else ["mlx-lm computes another model even before it is quantized"]
    )
    report = judge(compare(expected, found), opened.precision, str(form.bits))
    return report | {"n_bits": form.bits, "unquantized": unquantized, "problems": problems, "said": said}


def _write_gguf(
    stage: Stage, source: Path, opened: Opened, expected: Logits, form: Form, observer: Observer
) -> dict[str, Any]:
    """Checked twice: through transformers' reader and through crosstune's own."""
    from crosstune.models import gguf, gguf_writer

    kind = (
        {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[stored_word(source)]
        if form.kind == "auto"
        else form.kind
    )
    stage.result.mkdir()
    name = f"model-{kind}.gguf"
    show = show_bytes(observer, "write", name)
    gguf_writer.write_gguf(
        source, stage.result / name, kind=kind, progress=lambda _, done, total: show(done, total)
    )
    word = {"f32": "fp32", "f16": "fp16"}.get(kind, kind)
    report = judge(compare(expected, folder_logits(stage.result, opened, gguf=name)), opened.precision, word)
    reread = stage.scratch / "reread"
    reread.mkdir()
    gguf.convert(stage.result / name, reread)
    own = judge(compare(expected, folder_logits(reread, opened)), opened.precision, word, "bf16")
    problems = [] if own["verified"] else ["crosstune's own GGUF reader finds other weights in it"]
    return report | {"kind": kind, "file": name, "own_reader": own, "problems": problems, "reread": reread}


def _copy_model(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and path.name not in (RECORD, QUANTIZATION_RECORD)
        ):
            shutil.copy2(path, target / path.name)
