"""What was trained as something to keep, made and checked by MLX: for adapters over MLX's own bits, which torch cannot
read, and for every adapter on a machine without torch."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.core.logit_distance import Logits, compare
from crosstune.core.protocols import Observer
from crosstune.core.record import write_json
from crosstune.models.adapter_files import copy_template
from crosstune.models.folder import weight_files
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import read_quantization
from crosstune.models.staged import Stage, check_out, staged
from crosstune.models.weights import read_header
from crosstune.planner.gather import make_plan
from crosstune.results.merge import (
    RECORD,
    SPARE_BYTES,
    Request,
    check_base,
    cost_warnings,
    default_out,
    no_original,
    not_quantized,
    nothing_to_merge,
    show_bytes,
)
from crosstune.results.original_model import find_original
from crosstune.results.trained_folder import Trained, find_trained
from crosstune.results.verify import chat_problems, judge, make_prompts, refuse_unverified
from crosstune.runs.open_parts import find_model, open_session

_WORDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def made_by_mlx(request: Request) -> bool:
    """Whether MLX is the one to fold an adapter: it was trained over MLX's bits, or there is no torch, or it is asked."""
    if importlib.util.find_spec("mlx_lm") is None or request.backend not in ("auto", "mlx"):
        return False
    trained = find_trained(request.target, base=request.base)
    if trained.adapter is None:
        return False
    over_bits = trained.quantization is not None and trained.quantization.quantizer == "mlx"
    return request.backend == "mlx" or over_bits or importlib.util.find_spec("torch") is None


def merge(
    request: Request, *, observer: Observer, word: str = "merged", bits: int = 16, group_size: int = 64
) -> dict[str, Any]:
    """Fold an adapter into its base, quantize the result unless it shall have 16 bits, and compare it with what was
    trained."""
    trained = find_trained(request.target, base=request.base)
    if trained.adapter is None:
        raise nothing_to_merge(trained)
    if request.into == "dequantized" and trained.quantization is None:
        raise not_quantized(request.target)
    model = find_model(make_config(model_name=trained.base), observer)
    warnings = check_base(trained, model, force=request.force)
    out = request.out or default_out(trained, word)
    check_out(out)
    size = sum(path.stat().st_size for path in weight_files(model.path))
    with staged(out, need_bytes=(1 if trained.quantization is None else 8) * size + SPARE_BYTES) as stage:
        report = _Merging(trained, model, request, observer).write(stage, bits=bits, group_size=group_size)
        report["warnings"] = [*warnings, *report.get("warnings", ())]
        problems = [*report.pop("problems", ()), *chat_problems(model.path, stage.result)]
        made = "merged" if word == "merged" else "exported"
        write_json(stage.result / RECORD, {made: report})
        refuse_unverified(report | {"problems": problems}, out)
    return report | {"path": str(out)}


class _Merging:
    def __init__(self, trained: Trained, model: ModelFolder, request: Request, observer: Observer) -> None:
        self.trained, self.model, self.request, self.observer = trained, model, request, observer
        self.prompts = make_prompts(model.path)
        self.original = self._find_original()

    def write(self, stage: Stage, *, bits: int, group_size: int) -> dict[str, Any]:
        from crosstune.mlx_engine import export
        from crosstune.mlx_engine.merge import write_merged

        into = self.request.into or "original"
        session, precision = self._open(quantized=True)
        wanted = expected = session.logits(self.prompts)
        source, dequantized = self.model.path, into == "dequantized"
        if self.trained.quantization is not None and not dequantized:
            assert self.original is not None
            del session
            gc.collect()  # a session holds on to itself in circles, and the next one needs its memory
            session, precision = self._open(quantized=False)
            expected, source = session.logits(self.prompts), self.original
        folder = stage.scratch / "merged"
        on_write = show_bytes(self.observer, "merge", self.trained.base)
        write_merged(
            folder, source, session, dequantized=dequantized, dtype=self.request.dtype, on_write=on_write
        )
        del session
        assert self.trained.adapter is not None
        copy_template(self.trained.adapter, folder)
        kept = _stored_word(folder)
        report: dict[str, Any] = {
            "adapter": str(self.trained.adapter),
            "base": self.trained.base,
            "into": into,
            "dtype": kept,
            "checked_by": "mlx-lm",
        }
        found = export.folder_logits(folder, self.prompts)
        report |= judge(compare(expected, found), precision, kept)
        if self.trained.quantization is not None:
            report |= self._costs(wanted, found, into)
        if bits == export.PLAIN_BITS:
            folder.rename(stage.result)
            return report
        plain = {"agreement": report["agreement"], "bound": report["bound"], "verified": report["verified"]}
        problems = (
            [] if plain["verified"] else ["the merged model is another one even before it is quantized"]
        )
        said = export.convert_folder(folder, stage.result, bits=bits, group_size=group_size)
        report |= judge(compare(expected, export.folder_logits(stage.result, self.prompts)), str(bits))
        report["warnings"] = [*report.get("warnings", ()), *said]
        return report | {"n_bits": bits, "unquantized": plain, "problems": problems}

    def _costs(self, wanted: Logits, found: Logits, into: str) -> dict[str, Any]:
        """How far the result is from the adapter over the bits it was trained over."""
        costs = {into: compare(wanted, found).to_json()}
        return {"against_trained": costs, "warnings": cost_warnings(costs, into)}

    def _open(self, *, quantized: bool) -> tuple[Any, str]:
        options = self.trained.options(quantized=quantized) | {"backend": "mlx"}
        folder = self.model.path if quantized or self.original is None else self.original
        plan = make_plan(make_config(**options | {"model_name": str(folder)}))
        model = ModelFolder(name=str(folder), path=folder, source="folder")
        return open_session(plan, model, trained=False), plan.precision

    def _find_original(self) -> Path | None:
        """The weights before they had few bits: in the base itself, where training quantized it on the way."""
        held = read_quantization(self.model.path)
        found = self.model.path if held is None else find_original(held.original)
        if found is None and self.request.into != "dequantized":
            raise no_original(self.model.path)
        return found


def _stored_word(folder: Path) -> str:
    types = [entry["dtype"] for path in weight_files(folder) for entry in read_header(path)[0].values()]
    words = [_WORDS[kind] for kind in types if kind in _WORDS]
    return max(sorted(set(words)), key=words.count) if words else "fp32"
