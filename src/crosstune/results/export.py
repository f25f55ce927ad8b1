"""Export a trained run, or any model, for other tools; read the result back and compare it.

Exports to serve or evaluate are kept in the cache, keyed by the identity of their sources, and reused until these change.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.logit_distance import check_finite, measure_agreement
from crosstune.core.model_folders import PLAIN_BITS, DenseWeights, Rewrite
from crosstune.core.quantization import GGUF_PLAIN
from crosstune.files.json_files import write_json
from crosstune.models.cache import install
from crosstune.models.file_hashes import sha256_of_all, write_checksums
from crosstune.models.identity import RECORD, identity, source_record
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import RECORD as QUANTIZATION_RECORD
from crosstune.models.quantized_folder import dense_bytes, read_quantization, stored_format
from crosstune.models.staged import Stage, check_out, staged
from crosstune.results.merge import DenseModel, merge_into, write_expanded
from crosstune.results.opened import (
    Form,
    Opened,
    Request,
    check_for_mlx,
    gguf_engine,
    open_engine,
    open_request,
    original_record,
    read_logits,
    show_bytes,
)
from crosstune.results.verify import (
    VERDICT,
    chat_problems,
    largest_difference,
    refuse_unverified,
    report_agreement,
)
from crosstune.results.vllm import vllm_report
from crosstune.runs.open_parts import show_progress
from crosstune.runs.trained_folder import Trained

FORMATS = ("hf", "mlx", "gguf", "ollama", "vllm")
_NOT_FOR_MLX = (
    "do not use that folder: this mlx-lm computes the model differently; use --to hf, or try a newer mlx-lm"
)


def export(
    request: Request, form: Form, *, observer: Observer, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the target in the given format, read it back, compare it, and return a report that includes `facts`."""
    if form.to == "vllm":
        return _command_for_vllm(request, observer, facts)
    write: Callable[..., dict[str, Any]] = _write_mlx if form.to == "mlx" else _write_hf
    as_gguf = form.to in ("gguf", "ollama")
    if request.out is not None:
        check_out(request.out)
    if form.to == "mlx":
        open_engine("mlx").check_form(form.mlx)  # before the costly merge
    opened, warnings = open_request(request, observer, engine=gguf_engine(request) if as_gguf else None)
    if form.to == "mlx":
        warnings += check_for_mlx(request.target, opened.model.path, opened.prompts)
    if as_gguf:
        from crosstune.results import gguf_export

        rows, noted = gguf_export.check(opened, form, observer)
        warnings += noted
        write = functools.partial(gguf_export.write, rows=rows)
    out = request.out or opened.trained.result_path(form.name)
    is_file = out.suffix.lower() == ".gguf"
    if is_file and form.to != "gguf":
        raise UserError(
            f"{out} is a GGUF file name, but --to {form.to} writes a folder.",
            do="choose a different --out, or use --to gguf",
        )
    if is_file:
        write = functools.partial(write, title=out.name)
    is_plain = form.kind in ("auto", *GGUF_PLAIN) and form.max_kl is None
    num_copies = 1 if form.to == "hf" else 2 if is_plain else 3
    with staged(out, need_bytes=num_copies * dense_bytes(opened.model.path, request.dtype)) as stage:
        source = _make_dense(stage, opened, request, observer)
        report = source.report | write(stage, source, opened, form, observer)
        if opened.trained.adapter is None:
            report |= source_record(opened.model.path, result=stage.result)
        if form.to == "mlx" and opened.trained.adapter is None and opened.trained.quantization is None:
            held = read_quantization(opened.model.path)
            report["original"] = original_record(opened.model, held, None)
        warnings += [*source.report.get("warnings", ()), *report.pop("said", ())]
        report |= {"to": form.to, "warnings": warnings, **(facts or {})}
        problems = list(report.pop("problems", ()))
        if reread := report.pop("reread", None if as_gguf else stage.result):  # llama.cpp compares its own
            problems += chat_problems(opened.tokenizer_folder, reread)
        write_json(stage.result / RECORD, {"exported": report})
        by_mlx = form.to == "mlx" and opened.engine.reader != report.get("checked_by")
        refuse_unverified(report | {"problems": problems}, out, do=_NOT_FOR_MLX if by_mlx else None)
        if is_file:  # the GGUF file itself is the result
            (stage.result / report["file"]).rename(stage.scratch / "file")
            shutil.rmtree(stage.result)
            (stage.scratch / "file").rename(stage.result)
    return report | {"path": str(out)}


def _make_dense(stage: Stage, opened: Opened, request: Request, observer: Observer) -> DenseModel:
    """Return the target as a dense model folder: merged, dequantized, or the model folder itself."""
    trained, folder = opened.trained, opened.model.path
    if trained.adapter is not None:
        return merge_into(stage.scratch / "merged", opened, request, observer)
    if trained.quantization is not None:
        return write_expanded(stage.scratch / "expanded", opened, request, observer)
    expected = check_finite(read_logits(folder, opened), trained.base)
    if request.dtype != "auto" or read_quantization(folder) is not None:
        weights, folder = DenseWeights(folder=folder, dtype=request.dtype), stage.scratch / "plain"
        opened.engine.write_dense(folder, weights, on_bytes=show_bytes(observer, "read", trained.base))
    report = {"model": trained.base, "dtype": stored_format(folder)}
    return DenseModel(folder=folder, expected=expected, report=report)


def _write_hf(
    stage: Stage, source: DenseModel, opened: Opened, form: Form, observer: Observer
) -> dict[str, Any]:
    if source.folder.is_relative_to(stage.scratch):
        source.folder.rename(stage.result)
    else:
        _copy_model(source.folder, stage.result)
    if "agreement" in source.report:  # already compared after the merge
        return {}
    found = read_logits(stage.result, opened)
    verdict = report_agreement(
        measure_agreement(source.expected, found),
        *(opened.precision, stored_format(stage.result)),
        difference=largest_difference(stage.result, opened.prompts, source.expected, found),
    )
    return {"checked_by": opened.engine.reader} | verdict


def _write_mlx(
    stage: Stage, source: DenseModel, opened: Opened, form: Form, observer: Observer
) -> dict[str, Any]:
    mlx = open_engine("mlx")
    by_mlx = opened.engine.reader == mlx.reader
    if by_mlx and form.bits == PLAIN_BITS:  # a folder merged by MLX is already in its format
        return _write_hf(stage, source, opened, form, observer)
    view = mlx.readable(source.folder, view=stage.scratch / "view")
    rewrite = Rewrite(source=view, form=form.mlx, tokenizer=view)
    said = mlx.rewrite_folder(stage.result, rewrite, scratch=stage.scratch).warnings
    written = mlx.logits(stage.result, opened.prompts)
    agreement = measure_agreement(source.expected, written)
    difference = largest_difference(view, opened.prompts, source.expected, written)
    plain = stored_format(source.folder)
    report = {"n_bits": form.bits, "checked_by": mlx.reader}
    if form.bits == PLAIN_BITS:
        return report | report_agreement(agreement, opened.precision, plain, difference=difference)
    # Quantization error can hide a wrong conversion, so compare the unquantized model too.
    if by_mlx:
        unquantized = {name: source.report[name] for name in VERDICT}
    else:
        found = mlx.logits(view, opened.prompts)
        unquantized = report_agreement(measure_agreement(source.expected, found), opened.precision, plain)
    problems = (
        [] if unquantized["verified"] else ["mlx-lm computes different logits even before quantization"]
    )
    report |= report_agreement(agreement, opened.precision, str(form.bits), difference=difference)
    return report | {"unquantized": unquantized, "problems": problems, "said": said}


def _command_for_vllm(
    request: Request, observer: Observer, facts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the command that serves the target with vLLM; nothing is written."""
    opened, warnings = open_request(request, observer, engine="torch")
    report = vllm_report(opened.trained, opened.model.path) | dict(facts or {})
    path = str(opened.trained.home or opened.model.path)
    return report | {"to": "vllm", "path": path, "warnings": [*warnings, *report.get("warnings", ())]}


def _copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model folder, except crosstune's records."""
    target.mkdir()
    for path in source.glob("[!.]*"):
        if path.is_file() and path.name not in (RECORD, QUANTIZATION_RECORD):
            shutil.copy2(path, target / path.name)


_KEY_CHARS = 12
_HASHED = ("*.safetensors", "*.json", "*.jinja", "*.model")


def cached_export(target: str, trained: Trained, model: ModelFolder, to: str, *, observer: Observer) -> Path:
    """Return the exported model folder, or the GGUF file, from the cache if its sources have not changed."""
    key = weights_key(trained, model, to)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name_of(target, trained)).strip(".-") or "model"
    result = "model.gguf" if to == "gguf" else "model"

    def build(folder: Path, scratch: Path) -> None:
        export(Request(target=target, out=folder / result), Form(to=to), observer=observer)
        write_checksums(folder)

    folder = install(
        f"{stem}-{to}-{key[:_KEY_CHARS]}",
        build,
        need_bytes=3 * dense_bytes(model.path, "auto"),
        source={"kind": "export", "form": to, "sha256": key},
        progress=show_progress(observer, target),
    )
    return folder / result


def weights_key(trained: Trained, model: ModelFolder, *words: str) -> str:
    """Return a hash of everything that determines the answers of a target: weights, settings, tokenizer and template."""
    key = hashlib.sha256("\0".join([*words, identity(model.path)["sha256"]]).encode())
    for folder in (model.path, trained.adapter):
        files = sorted(path for pattern in _HASHED for path in folder.glob(pattern)) if folder else []
        for path, digest in sha256_of_all(files).items():
            key.update(f"{path.name}\0{digest}\0".encode(errors="surrogateescape"))
    return key.hexdigest()


def name_of(target: str, trained: Trained) -> str:
    """Return a short name for a target: the run's, the folder's, or the model's name as it was given."""
    if trained.home is None:
        return target
    home = trained.home
    return home.parent.name if home.name in ("adapter", "model") and not trained.is_run else home.name
