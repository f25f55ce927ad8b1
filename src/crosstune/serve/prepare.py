"""Turn a run or a model into the files that an engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.backends._host import memory_bytes
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.files.plain_files import readable_bytes
from crosstune.models.folder import longest_context, weight_files
from crosstune.models.gguf_metadata import check_header
from crosstune.models.quantized_folder import dense_bytes, read_quantization
from crosstune.results.cached_export import cached_export, name_of
from crosstune.runs.open_parts import find_model
from crosstune.runs.trained_folder import check_base, find_trained
from crosstune.serve.engines import ENGINES, is_gguf, takes_adapter

_OVERHEAD = 1.1
"""Memory of a served model per byte of its weights: buffers and a small context."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The files of a model, ready for an engine."""

    name: str
    path: Path
    context: int | None
    """The longest context of the model, if known."""
    adapter: Path | None = None
    rank: int = 0
    tokenizer: Path | None = None

    @property
    def size_bytes(self) -> int:
        files = [self.path] if self.path.is_file() else weight_files(self.path)
        return sum(path.stat().st_size for path in files)


def prepare(target: str, engine: str, *, observer: Observer) -> Prepared:
    """Find the model of a target and export it for the engine, unless the engine reads it directly."""
    if is_gguf(target):
        path = Path(target).expanduser().absolute()
        facts = check_header(path)
        check_memory(target, path.stat().st_size)
        _note_template(target, facts, observer)
        context = facts.get(f"{facts.get('general.architecture')}.context_length")
        context = context if isinstance(context, int) and context > 0 else None
        return Prepared(name=path.stem, path=path, context=context)
    trained = find_trained(target)
    model = find_model(make_config(**trained.options()), observer)
    for sentence in check_base(trained, model):
        observer.on_event(Warned(message=sentence))
    if engine in ("llamacpp", "mlx"):  # on the host's memory
        check_memory(target, dense_bytes(model.path, "auto"))
    context, name = longest_context(model.path), name_of(target, trained)
    if takes_adapter(engine, trained):
        tokenizer = trained.tokenizer_folder(model.path)
        return Prepared(
            name=name,
            path=model.path,
            context=context,
            adapter=trained.adapter,
            rank=int(trained.settings["r"]),
            tokenizer=tokenizer if tokenizer != model.path else None,
        )
    form = ENGINES[engine].form
    if trained.adapter is None and _reads(form, model.path):
        return Prepared(name=name, path=model.path, context=context)
    path = cached_export(target, trained, model, form, observer=observer)
    if form == "gguf":
        _note_template(target, check_header(path), observer)
    return Prepared(name=name, path=path, context=context)


def _note_template(target: str, header: Mapping[str, Any], observer: Observer) -> None:
    if "tokenizer.chat_template" not in header:
        message = (
            f"{target} has no chat template: llama.cpp writes the turns of a chat in its own format (ChatML)"
        )
        observer.on_event(Warned(message=message))


def check_memory(target: str, weight_bytes: int) -> None:
    """Raise a UserError for weights that exceed the free memory."""
    need, (total, free) = int(weight_bytes * _OVERHEAD), memory_bytes()
    if need > free:
        raise UserError(
            f"{target} does not fit into the memory of this machine.",
            why=f"its weights need about {readable_bytes(need)}; {readable_bytes(free)} of {readable_bytes(total)} "
            "are free.",
            do="close other programs, or serve a smaller file: crosstune export ... --to gguf --gguf_type q8_0",
        )


def _reads(form: str, folder: Path) -> bool:
    """Return True if an engine for this format reads a model folder directly."""
    held = read_quantization(folder)
    return form != "gguf" and (held is None or (form == "mlx" and held.spec.quantizer == "mlx"))
