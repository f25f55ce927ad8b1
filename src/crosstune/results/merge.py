"""What was trained as something to keep: folded into its base, or written for other tools, and always checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.logit_distance import Logits, compare
from crosstune.core.protocols import Observer
from crosstune.core.record import write_json
from crosstune.models.adapter_files import copy_template
from crosstune.models.locate import ModelFolder, identity
from crosstune.models.quantized_folder import read_quantization
from crosstune.models.staged import check_out, staged
from crosstune.results.original_model import find_original
from crosstune.results.trained_folder import Trained, find_trained
from crosstune.results.verify import (
    Opened,
    find_quantizer,
    judge,
    open_trained,
    refuse_unverified,
    trained_logits,
)

if TYPE_CHECKING:
    from crosstune.torch_engine.merge import Base

RECORD = "crosstune.json"
INTO = ("original", "dequantized")
_FAR_FROM_TRAINED = 0.1
"""Relative difference of logits that rounding to 16 bits does not explain."""
SPARE_BYTES = 50_000_000
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a result, whichever form it takes."""

    target: str
    out: Path | None = None
    into: str | None = None
    """original or dequantized; None takes the original weights."""
    dtype: str = "auto"
    base: str | None = None
    force: bool = False
    backend: str = "auto"


def merge(request: Request, *, observer: Observer) -> dict[str, Any]:
    """Fold an adapter into full-precision weights, and compare the folder with what was trained."""
    opened, warnings = open_request(request, observer)
    if opened.trained.adapter is None:
        raise nothing_to_merge(opened.trained)
    out = request.out or default_out(opened.trained, "merged")
    check_out(out)
    with staged(out, need_bytes=dense_bytes(opened.model.path, request.dtype)) as stage:
        report = merge_into(stage.result, opened, request, observer)[0]
        report["warnings"] = [*warnings, *report.get("warnings", ())]
        write_json(stage.result / RECORD, {"merged": report})
        refuse_unverified(report, out)
    return report | {"path": str(out)}


def base_candidates(opened: Opened, into: str | None) -> dict[str, Base]:
    """The weights an adapter can be folded into, by the words of --into."""
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.merge import Base
    from crosstune.torch_engine.precision import PRECISIONS

    trained, path = opened.trained, opened.model.path
    device = open_device(opened.plan.backend)
    if trained.quantization is None:
        return {"original": Base(folder=path, device=device)}
    precision = PRECISIONS[trained.precision]
    compute = precision.autocast or precision.weights
    seen = Base(folder=path, spec=trained.quantization, compute=compute, device=device)
    held = read_quantization(path)
    original = path if held is None else find_original(held.original)
    if original is not None:
        return {"original": Base(folder=original, device=device), "dequantized": seen}
    if into != "dequantized":
        raise no_original(path)
    return {"dequantized": seen}


def show_bytes(observer: Observer, stage: str, name: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        observer.on_event("model_progress", {"stage": stage, "done": done, "total": total, "model": name})

    return show


def default_out(trained: Trained, word: str) -> Path:
    """Inside a run; beside an adapter or a model folder; else here, under the model's name."""
    if trained.home is None:
        return Path(f"{Path(trained.base).name}-{word}").absolute()
    return trained.home / word if trained.is_run else trained.home.with_name(f"{trained.home.name}-{word}")


def mlx_word(bits: int) -> str:
    """What a folder for MLX is named after; 16 bits are dense."""
    return "mlx" if bits == 16 else f"mlx-{bits}bit"


def dense_bytes(folder: Path, dtype: str) -> int:
    """Room that the weights of a folder need in full precision."""
    from crosstune.torch_engine.merge import stored_dtypes, weight_shapes

    dtypes = stored_dtypes(folder)
    sizes = (
        math.prod(shape) * _DTYPE_BYTES.get(dtype, dtypes[name].itemsize)
        for name, shape in weight_shapes(folder).items()
    )
    return sum(sizes) + SPARE_BYTES


def stored_word(folder: Path) -> str:
    """The number format of most of a folder's weights."""
    from crosstune.torch_engine.merge import DTYPES, stored_dtypes

    words = {dtype: word for word, dtype in DTYPES.items()}
    found = [words[dtype] for dtype in stored_dtypes(folder).values() if dtype in words]
    return max(sorted(set(found)), key=found.count) if found else "fp32"


def merge_into(
    folder: Path, opened: Opened, request: Request, observer: Observer
) -> tuple[dict[str, Any], Logits]:
    """The merged folder: a report of how far it is from what was trained, and the logits that it should have."""
    from crosstune.torch_engine import merge as engine

    trained = opened.trained
    assert trained.adapter is not None
    adapter = engine.read_adapter(trained.adapter, trained.settings)
    dtype = engine.DTYPES.get(request.dtype)
    bases = base_candidates(opened, request.into)
    into = request.into or "original"
    engine.check_fit(bases[into], adapter)
    wanted = trained_logits(opened)
    if into == "dequantized" or trained.quantization is None:
        expected = wanted
    else:
        expected = trained_logits(opened, quantized=False, folder=bases[into].folder)
    on_read = show_bytes(observer, "merge", trained.base)
    engine.write_merged(folder, bases[into], adapter, dtype=dtype, on_read=on_read)
    copy_template(trained.adapter, folder)
    kept = stored_word(folder)
    report: dict[str, Any] = {
        "adapter": str(trained.adapter),
        "base": trained.base,
        "into": into,
        "dtype": kept,
    }
    others = {name: engine.merged_tensors(base, adapter, dtype=dtype) for name, base in bases.items()}
    del others[into]
    found = _candidate_logits(folder, opened, others, into=into)
    report |= judge(compare(expected, found[into]), opened.precision, kept)
    if trained.quantization is not None:
        costs = {name: compare(wanted, found[name]).to_json() for name in INTO if name in found}
        report |= {"against_trained": costs, "warnings": cost_warnings(costs, into)}
    return report, expected


def expanded_into(
    folder: Path, opened: Opened, request: Request, observer: Observer
) -> tuple[Path, Logits, dict[str, Any]]:
    """New blocks that were trained over a quantized base: over the original weights, as they are saved, or over what
    training saw of them, written into `folder`. With the logits the result should have, and what the first costs."""
    from crosstune.torch_engine import convert, verify
    from crosstune.torch_engine import merge as engine
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.precision import PRECISIONS

    trained, path = opened.trained, opened.model.path
    assert trained.quantization is not None
    trained_in, device = PRECISIONS[trained.precision], open_device(opened.plan.backend)
    seen = engine.Base(
        folder=path,
        spec=trained.quantization,
        compute=trained_in.autocast or trained_in.weights,
        new_blocks=trained.new_blocks,
        device=device,
    )
    precision = PRECISIONS[opened.precision]
    model = verify.load_plainly(path, precision=precision, device=device)
    original = verify.model_logits(model, opened.prompts, precision=precision, device=device)
    verify.replace_weights(model, engine.base_tensors(seen))
    wanted = verify.model_logits(model, opened.prompts, precision=precision, device=device)
    into = request.into or "original"
    costs = {"original": compare(wanted, original).to_json()}
    if into == "dequantized" or request.dtype != "auto":
        source = seen if into == "dequantized" else engine.Base(folder=path)
        on_read = show_bytes(observer, "read", trained.base)
        convert.write_dense(folder, source, dtype=engine.DTYPES.get(request.dtype), on_read=on_read)
        path = folder
    report = {"model": trained.base, "into": into, "dtype": stored_word(path), "against_trained": costs}
    warnings = cost_warnings(costs, into)
    return path, wanted if into == "dequantized" else original, report | {"warnings": warnings}


def cost_warnings(costs: Mapping[str, Mapping[str, float]], into: str) -> list[str]:
    """A result over the original weights that is far from what was trained over quantized ones."""
    relative = costs.get(into, {}).get("relative", 0.0)
    if into != "original" or relative <= _FAR_FROM_TRAINED:
        return []
    return [
        f"over the original weights the result is {relative:.2g} (relative) from what was trained over the quantized ones; "
        "--into dequantized keeps that"
    ]


def open_request(request: Request, observer: Observer) -> tuple[Opened, list[str]]:
    """Find the base, and refuse another one than the adapter was trained over."""
    trained, warnings = _over_original(find_trained(request.target, base=request.base), request)
    if request.into == "dequantized" and trained.quantization is None:
        raise not_quantized(request.target)
    opened = open_trained(trained, backend=request.backend, observer=observer)
    if trained.quantization is not None:
        opened = find_quantizer(opened, trained.quantization)
    return opened, [*warnings, *check_base(trained, opened.model, force=request.force)]


def _over_original(trained: Trained, request: Request) -> tuple[Trained, list[str]]:
    """torch cannot make the few bits of MLX again. What was trained over them is folded into the original weights,
    which is the usual place for it, and only what that costs stays unmeasured."""
    if trained.quantization is None or trained.quantization.quantizer != "mlx":
        return trained, []
    if request.into == "dequantized":
        raise UserError(
            "--into dequantized is not possible for an adapter that was trained over an MLX base.",
            why="torch, which folds adapters here, cannot read MLX's bits.",
            do="leave --into out, or use mlx-lm: mlx_lm.fuse --dequantize --adapter-path ADAPTER/mlx",
        )
    plain = dataclasses.replace(trained, record={**trained.record, "quantization": None})
    return plain, [
        "it was trained over a base in MLX's bits; what the original weights change was not measured"
    ]


def _candidate_logits(
    folder: Path, opened: Opened, others: Mapping[str, Iterator[tuple[str, Any]]], *, into: str
) -> dict[str, Logits]:
    """Logits of a merged folder, and of the same model with the weights of the other ways to merge."""
    from crosstune.torch_engine import verify
    from crosstune.torch_engine.device import open_device
    from crosstune.torch_engine.precision import PRECISIONS

    precision, device = PRECISIONS[opened.precision], open_device(opened.plan.backend)
    model = verify.load_plainly(folder, precision=precision, device=device)
    found = {into: verify.model_logits(model, opened.prompts, precision=precision, device=device)}
    for name, tensors in others.items():
        verify.replace_weights(model, tensors)
        found[name] = verify.model_logits(model, opened.prompts, precision=precision, device=device)
    return found


def check_base(trained: Trained, model: ModelFolder, *, force: bool) -> list[str]:
    if trained.adapter is None:
        return []
    recorded = trained.base_identity
    if recorded is None:
        return [f"{trained.adapter} does not say over which weights it was trained; the base was not checked"]
    found = identity(model.path)["sha256"]
    if found == recorded:
        return []
    name = trained.record["base"].get("name")
    if force:
        return [f"the base {model.path} ({found[:12]}) is not that of training, {name} ({recorded[:12]})"]
    raise UserError(
        f"The adapter {trained.adapter} was trained over another base.",
        why=f"it was trained over {name} with the identity {recorded[:12]}; {model.path} has {found[:12]}.",
        do="name the right base with --base, or pass --force to go on with this one",
    )


def nothing_to_merge(trained: Trained) -> UserError:
    how = f" (it was trained with {trained.method})" if trained.method else ""
    return UserError(
        f"There is nothing to merge in {trained.home or trained.base}.",
        why=f"it holds a whole model{how}, not an adapter.",
        do="use the model folder as it is, or crosstune export",
    )


def no_original(folder: Path) -> UserError:
    return UserError(
        f"The original weights of {folder} are not on this machine.",
        why="the adapter was trained over weights that had been quantized before.",
        do="use --into dequantized, or put the original weights where the folder's record names them",
    )


def not_quantized(target: str) -> UserError:
    return UserError(
        "--into dequantized is for what was trained over a quantized base.",
        why=f"{target} was not.",
        do="leave --into out",
    )
