"""Models and adapters between MLX's form and everyone else's, where MLX itself does the work: adapters in both
directions, MLX's quantized folders made plain, and plain ones quantized on a machine without torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.core.logit_distance import Logits, compare
from crosstune.core.protocols import Observer
from crosstune.core.quantization import QuantSpec
from crosstune.core.record import write_json
from crosstune.models import mlx_adapters
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.adapter_fit import check_fit
from crosstune.models.folder import weight_files
from crosstune.models.llama_layout import CONFIG
from crosstune.models.locate import ModelFolder, locate
from crosstune.models.quantized_folder import FolderQuantization, read_quantization
from crosstune.models.staged import Stage, Unverified, check_out, staged
from crosstune.models.weights import read_arrays
from crosstune.results.merge import RECORD, mlx_word
from crosstune.results.original_model import (
    NOT_THE_ORIGINAL,
    choose_original,
    not_the_original,
    original_record,
)
from crosstune.results.verify import judge, make_prompts, refuse_unverified
from crosstune.runs.open_parts import weights_identity

_SPARE_BYTES = 50_000_000


def holds_adapter(target: str) -> bool:
    folder = Path(target).expanduser()
    return mlx_adapters.adapter_form(folder) is not None


def convert_adapter(target: str, *, to: str, out: Path | None, base: str | None) -> dict[str, Any]:
    """An adapter folder in the other form, read back and turned again: not a bit may differ."""
    source = Path(target).expanduser().absolute()
    form = mlx_adapters.adapter_form(source)
    if to not in ("mlx", "peft") or form == to:
        raise UserError(
            f"{source} cannot be converted to {to}.",
            why=f"it is an adapter in the form of {form}.",
            do=f"use --to {'peft' if form == 'mlx' else 'mlx'}, or crosstune merge to fold it into its base",
        )
    if base is not None and (Path(base).expanduser() / CONFIG).is_file():
        check_fit(source, Path(base).expanduser())
    out = out or source.with_name(f"{source.name}-{to}")
    with staged(out, need_bytes=_SPARE_BYTES) as stage:
        back = stage.scratch / "back"
        if to == "mlx":
            mlx_adapters.to_mlx(source, stage.result, base=base)
            mlx_adapters.to_peft(stage.result, back)
        else:
            mlx_adapters.to_peft(source, stage.result, base=base)
            mlx_adapters.to_mlx(stage.result, back)
        name = mlx_adapters.MLX_WEIGHTS if to == "peft" else mlx_adapters.PEFT_WEIGHTS
        before, after = read_arrays(source / name), read_arrays(back / name)
        exact = before.keys() == after.keys() and all(
            before[key][0] == after[key][0] and before[key][1].tobytes() == after[key][1].tobytes()
            for key in before
        )
        if not exact:
            raise Unverified(f"The adapter {source} came back with other numbers.", do="report it")
    return {"adapter": str(source), "to": to, "exact": exact, "num_matrices": len(before), "path": str(out)}


def from_or_to_mlx(model: str, to: str) -> bool:
    """Whether MLX alone can do it: its own bits made plain or changed, or plain weights where there is no torch."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        held = read_quantization(folder)
        if held is not None and held.spec.quantizer == "mlx":
            return True
    return to == "mlx" and importlib.util.find_spec("torch") is None


def check_held(model: str, said: str | None) -> None:
    held = read_quantization(Path(model).expanduser()) if Path(model).expanduser().is_dir() else None
    found = held.spec.quantizer if held is not None else "none"
    if said not in (None, found):
        raise UserError(f"{model} does not hold what --from {said} says.", do=f"use --from {found}")


@dataclass(frozen=True, kw_only=True)
class MlxForm:
    """What MLX is asked to write: `to` is mlx, or none and hf for plain weights. 16 bits are dense."""

    to: str
    bits: int
    group_size: int
    dtype: str

    @property
    def word(self) -> str:
        return mlx_word(self.bits) if self.to == "mlx" else "plain"


def convert_by_mlx(
    name: str,
    form: MlxForm,
    *,
    original: str | None = None,
    force: bool = False,
    out: Path | None,
    observer: Observer,
) -> dict[str, Any]:
    """Start from the original weights where they are found, as `original` says, and compare with those."""
    if form.to not in ("none", "hf", "mlx"):
        raise UserError(
            f"{name} cannot be converted to {form.to} in one step.",
            why="it holds MLX's own bits, which only MLX reads.",
            do=f"make it plain first: crosstune convert {name} --to hf",
        )
    from crosstune.mlx_engine import export

    export.check_form(bits=form.bits if form.to == "mlx" else export.PLAIN_BITS, group_size=form.group_size)
    model = _find(name, observer)
    held = read_quantization(model.path)
    _check_other(model, held, form)
    found = choose_original(original, model, held, force=force)
    start = found or model.path
    out = out or default_out(model, form.word)
    check_out(out)
    size = sum(path.stat().st_size for path in weight_files(start))
    growth = 2 if held is None or found is not None else 8  # 16 bits to 32, or 4
    with staged(out, need_bytes=growth * size + _SPARE_BYTES) as stage:
        report = _before(model, held, found, force=force)
        report |= (_write_mlx if form.to == "mlx" else _write_plain)(stage, start, model.path, form)
        report |= facts_of(name, held, found, reference=start) | {"to": form.to}
        report["source_identity"] = weights_identity(start)
        report["original"] = original_record(model, held, found)
        write_json(stage.result / RECORD, {"converted": report})
        refuse_unverified(report, out)
    return report | {"path": str(out)}


def facts_of(
    name: str, held: FolderQuantization | None, original: Path | None, *, reference: Path
) -> dict[str, Any]:
    """What was converted, and from which weights."""
    return {
        "model": name,
        "from": held.spec.quantizer if held is not None else "none",
        "started_from": "original" if held is None or original is not None else "dequantized",
        "reference": str(reference),
    }


def default_out(model: ModelFolder, word: str) -> Path:
    """Beside a model folder; else here, under the model's name."""
    if model.source == "folder":
        return model.path.with_name(f"{model.path.name}-{word}")
    return Path(f"{Path(model.name).name.removesuffix('.gguf')}-{word}").absolute()


def _check_other(model: ModelFolder, held: FolderQuantization | None, form: MlxForm) -> None:
    asked = QuantSpec(quantizer=form.to, bits=form.bits, group_size=form.group_size)
    if held is not None and held.spec.meaning() == asked.meaning():
        raise UserError(
            f"{model.path} is quantized in exactly that way already.", do="ask for other bits or groups"
        )


def _before(
    model: ModelFolder, held: FolderQuantization | None, original: Path | None, *, force: bool
) -> dict[str, Any]:
    """How far the bits that are replaced are from the original weights, where MLX can read them."""
    if original is None or held is None or held.spec.quantizer != "mlx":
        return {}
    from crosstune.mlx_engine import export

    relative = export.weights_error(model.path, original)
    if relative >= NOT_THE_ORIGINAL and not force:
        why = f"the quantized weights are {relative:.2f} away from them (relative)."
        raise not_the_original(original, model.name, why=why)
    prompts = make_prompts(model.path)
    agreement = compare(export.folder_logits(original, prompts), export.folder_logits(model.path, prompts))
    return {"before": {"weights": relative, "agreement": agreement.to_json()}}


def _write_plain(stage: Stage, start: Path, tokenizer: Path, form: MlxForm) -> dict[str, Any]:
    from crosstune.mlx_engine import export

    word = export.write_plain(start, stage.result, dtype=form.dtype)
    if tokenizer != start:
        copy_tokenizer(tokenizer, stage.result)
    prompts = make_prompts(tokenizer)
    expected = export.folder_logits(start, prompts)
    found = _transformers_logits(stage.result, prompts)
    by = "transformers" if found is not None else "mlx-lm"
    agreement = compare(expected, found if found is not None else export.folder_logits(stage.result, prompts))
    return {"dtype": word, "checked_by": by} | judge(agreement, word, "fp32")


def _write_mlx(stage: Stage, start: Path, tokenizer: Path, form: MlxForm) -> dict[str, Any]:
    from crosstune.mlx_engine import export

    source = start
    if read_quantization(start) is not None:
        source = stage.scratch / "plain"
        export.write_plain(start, source, dtype="auto")
    view = export.make_view(source, stage.scratch / "view")
    said = export.convert_folder(view, stage.result, bits=form.bits, group_size=form.group_size)
    if tokenizer != start:
        copy_tokenizer(tokenizer, stage.result)
    prompts = make_prompts(tokenizer)
    expected = export.folder_logits(start, prompts)
    agreement = compare(expected, export.folder_logits(stage.result, prompts))
    report = {"n_bits": form.bits, "checked_by": "mlx-lm", "warnings": said}
    return report | judge(agreement, str(form.bits) if form.bits != export.PLAIN_BITS else "bf16")


def _transformers_logits(folder: Path, prompts: list[list[int]]) -> Logits | None:
    """None without torch: then only mlx-lm can read the folder again."""
    if importlib.util.find_spec("torch") is None:
        return None
    from crosstune.torch_engine.verify import plain_logits

    return plain_logits(folder, prompts)


def _find(name: str, observer: Observer) -> ModelFolder:
    def show(stage: str, done: int, total: int | None) -> None:
        observer.on_event("model_progress", {"stage": stage, "done": done, "total": total, "model": name})

    return locate(name, cache=cache_override(), progress=show)
