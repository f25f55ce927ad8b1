"""Open the target of merge, export or convert: find its base and original weights, choose the engine, compute logits."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.config.load import load_config, make_config
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.model_folders import PLAIN_BITS, ModelFolders, WeightForm
from crosstune.core.quantization import QuantSpec
from crosstune.models.folder import check_folder
from crosstune.models.identity import identity, source_identity
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import FolderQuantization, dense_shapes, read_quantization
from crosstune.planner.gather import make_plan, plan_like, plan_over_quantized
from crosstune.results.verify import make_prompts
from crosstune.runs.open_parts import find_model, open_session, show_progress
from crosstune.runs.trained_folder import Trained, check_base, find_trained

NO_ORIGINAL = "none"
NOT_THE_ORIGINAL = 1.0
"""Relative error at which two sets of weights are unrelated."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to merge or export a target."""

    target: str
    out: Path | None = None
    into: str | None = None
    """original or dequantized; None means original."""
    dtype: str = "auto"
    base: str | None = None
    force: bool = False
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The format of an export. `bits` and `group_size` apply to MLX (16 bits: not quantized), `kind` to GGUF and Ollama."""

    to: str
    bits: int = PLAIN_BITS
    group_size: int = 64
    kind: str = "auto"
    adapter_only: bool = False
    """GGUF: write the adapter without its base."""
    imatrix: bool = False
    """GGUF: weight the quantization errors by the inputs of the layers on the run's training rows."""
    max_kl: float | None = None
    """GGUF: choose the smallest file with at most this KL divergence on the run's held-out rows."""

    @property
    def name(self) -> str:
        """The suffix of folders in this format."""
        if self.to == "mlx":
            return self.mlx.name
        kind = "auto" if self.max_kl is not None else "adapter" if self.adapter_only else self.kind
        parts = (self.to, "" if kind == "auto" and self.max_kl is None else kind, "imatrix" * self.imatrix)
        return "-".join(filter(None, parts))

    @property
    def mlx(self) -> WeightForm:
        return WeightForm(quantizer="mlx", bits=self.bits, group_size=self.group_size, double=False)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A trained target with its base found on this machine, its engine, and the prompts for comparing logits."""

    trained: Trained
    plan: Plan
    model: ModelFolder
    prompts: list[list[int]]
    engine: ModelFolders

    @property
    def precision(self) -> str:
        return self.plan.precision

    @property
    def tokenizer_folder(self) -> Path:
        return self.trained.tokenizer_folder(self.model.path)


def open_engine(name: str, plan: Plan | None = None) -> ModelFolders:
    """Return the engine's model folder operations on the plan's backend, or on the CPU in fp32."""
    if name == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        raise UserError(
            "Cannot write a model for MLX.",
            why="the Python package mlx-lm is not installed.",
            do="pip install 'crosstune[mlx]'",
        )
    module = importlib.import_module(f"crosstune.{name}_engine.model_folders")
    folders: ModelFolders = module.open_folders(plan)
    return folders


def open_request(
    request: Request, observer: Observer, *, engine: str | None = None
) -> tuple[Opened, list[str]]:
    """Open the target of a request, by default with the engine that supports it; return it with warnings."""
    trained, warnings = find_trained(request.target, base=request.base), list[str]()
    if engine is None:
        engine = "mlx" if _merges_with_mlx(trained, request.backend) else "torch"
    if engine == "torch":
        trained, warnings = _over_original(trained, request)
    if request.into == "dequantized" and trained.quantization is None:
        raise UserError(
            "--into dequantized needs a target that was trained on a quantized base.",
            why=f"the base of {request.target} was not quantized.",
            do="remove --into",
        )
    opened = open_trained(trained, engine=engine, backend=request.backend, observer=observer)
    if trained.quantization is not None:
        opened = find_quantizer(opened, trained.quantization)
    return opened, [*warnings, *check_base(trained, opened.model, force=request.force)]


def open_trained(trained: Trained, *, engine: str, backend: str, observer: Observer) -> Opened:
    """Plan for the engine, find the base, and tokenize the prompts."""
    if engine == "mlx":
        plan = make_plan(make_config(**trained.options() | {"backend": "mlx"}), base=trained.base_choice)
    else:
        plan = _plan_torch(trained, backend)
    model = find_model(plan.config, observer)
    return Opened(
        trained=trained,
        plan=plan,
        model=model,
        prompts=make_prompts(model.path),
        engine=open_engine(engine, plan),
    )


def find_quantizer(opened: Opened, spec: QuantSpec) -> Opened:
    """Return `opened` with the machine's quantizers probed; raise if the quantizer of `spec` does not run."""
    plan = plan_over_quantized(opened.plan, spec, folder=opened.model.path)
    return replace(opened, plan=replace(opened.plan, machine=plan.machine, backend=plan.backend))


def open_adapter(opened: Opened, *, quantized: bool = True, folder: Path | None = None) -> Any:
    """Open a session with the adapter over its base model, as in training; `folder` replaces the base's folder."""
    path = folder or opened.model.path
    options = opened.trained.options(quantized=quantized)
    options |= {"precision": opened.precision, "model_name": str(path)}
    plan = plan_like(opened.plan, options, base=opened.trained.base_choice)
    return open_session(plan, replace(opened.model, path=path), trained=False)


def read_logits(folder: Path, opened: Opened, *, gguf: str | None = None) -> Logits:
    """Return a folder's logits, computed by the engine's library or, if it cannot load the folder, by a session."""
    held = None if gguf else read_quantization(folder)
    if held is None or held.spec.quantizer == opened.engine.own_quantizer:
        return opened.engine.logits(folder, opened.prompts, gguf=gguf)
    plan = plan_over_quantized(opened.plan, held.spec, folder=folder)
    model = ModelFolder(name=str(folder), path=folder, source="folder")
    session: Any = open_session(plan, model, trained=False)
    logits: Logits = session.logits(opened.prompts)
    return logits


def check_for_mlx(name: str, folder: Path, prompts: Prompts) -> list[str]:
    """Raise if mlx-lm computes something other than transformers for the model in the folder; return warnings."""
    window = open_engine("mlx").ignored_window(folder)
    if window is None:
        return []
    if window < max(map(len, prompts)):
        raise UserError(
            f"{name} cannot be written for MLX.",
            why=f"mlx-lm does not apply the model's sliding window of {window} tokens, so its logits differ for "
            "longer inputs.",
            do="use it with transformers: crosstune export --to hf, or crosstune merge",
        )
    return [
        f"mlx-lm does not apply the model's sliding window of {window} tokens: beyond {window} tokens of prompt and "
        "answer, its results differ from the trained model's"
    ]


def show_bytes(observer: Observer, stage: str, name: str) -> Callable[[int, int], None]:
    """Return a callback that reports the finished bytes of a stage."""
    return functools.partial(show_progress(observer, name), stage)


def show_rows(observer: Observer, title: str, total: int, *, what: str) -> Callable[..., None]:
    """Return a callback that reports the number of finished rows and a result, and report its beginning."""

    def show(done: int, result: str = "") -> None:
        observer.on_event(Evaluating(done=done, total=total, what=what + result, stage=title))

    show(0)
    return show


def gguf_engine(request: Request) -> str:
    """Return the engine that computes a model to compare its GGUF file with: MLX on request or without torch."""
    has_mlx = importlib.util.find_spec("mlx_lm") is not None
    by_mlx = request.backend == "mlx" or (request.backend == "auto" and not has_torch())
    return "mlx" if has_mlx and by_mlx else "torch"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _merges_with_mlx(trained: Trained, backend: str) -> bool:
    """Return True if MLX merges the adapter: on request, or if torch cannot read the base or is missing."""
    has_mlx = importlib.util.find_spec("mlx_lm") is not None
    if not has_mlx or backend not in ("auto", "mlx") or trained.adapter is None:
        return False
    return backend == "mlx" or _is_over_mlx(trained) or not has_torch()


def _is_over_mlx(trained: Trained) -> bool:
    return trained.quantization is not None and trained.quantization.quantizer == "mlx"


def _plan_torch(trained: Trained, backend: str) -> Plan:
    """Plan for a torch backend, even if `auto` would select MLX."""
    if backend == "auto":
        backend = load_config().backend  # the environment may set it
    plan = make_plan(make_config(**trained.options(), backend=backend), base=trained.base_choice)
    if plan.engine != "torch":
        if backend != "auto":
            raise UserError(
                f"--backend {backend} does not work for this result.",
                why="torch writes and compares it.",
                do="remove --backend, or use --backend cpu",
            )
        if not has_torch():
            raise UserError(
                "Merging, exporting and converting need torch.",
                why="it is not installed.",
                do="pip install 'crosstune[torch]'",
            )
        config = replace(plan.config, backend="cpu", precision="auto")
        plan = make_plan(config, base=trained.base_choice)
    if trained.adapter is None and plan.backend.is_torch_cpu:
        # On the CPU, fp32 needs as much memory as autocast, and rounding does not hide differences.
        plan = plan_like(plan, trained.options() | {"precision": "fp32"})
    return plan


def _over_original(trained: Trained, request: Request) -> tuple[Trained, list[str]]:
    """Treat an adapter on an MLX-quantized base as an adapter on the original weights: torch cannot read the former."""
    if not _is_over_mlx(trained):
        return trained, []
    if request.into == "dequantized":
        raise UserError(
            "--into dequantized does not work for an adapter that was trained on an MLX base.",
            why="torch merges this adapter, and cannot read weights quantized by MLX.",
            do="remove --into, or use mlx-lm: mlx_lm.fuse --dequantize --adapter-path ADAPTER/mlx",
        )
    plain = replace(trained, record={**trained.record, "quantization": None})
    return plain, [
        "the base was quantized by MLX in training; the effect of the original weights is not measured"
    ]


def find_original(recorded: Mapping[str, Any] | None) -> Path | None:
    """Return the recorded folder of the original weights, if it still exists unchanged."""
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not (path / "config.json").is_file() or identity(path)["sha256"] != recorded["identity"]:
        return None
    return path


def choose_original(
    asked: str | None, model: ModelFolder, held: FolderQuantization | None, *, force: bool
) -> Path | None:
    """Return the original weights' folder, from --original or the record; None to convert the weights of the folder."""
    if held is None or asked == NO_ORIGINAL:
        return None
    if asked is None:
        return find_original(held.original)
    folder = Path(asked).expanduser().absolute()
    check_folder(folder)
    reason = _shape_difference(model.path, folder, held) or (
        "" if force else _identity_difference(model, folder, held)
    )
    if reason:
        raise not_the_original(folder, str(model.path), why=reason)
    return folder


def not_the_original(folder: str | Path, model: str, *, why: str) -> UserError:
    """Return the error for a folder with other weights than the original."""
    return UserError(
        f"{folder} does not contain the original weights of {model}.",
        why=why,
        do="pass the right folder with --original, or remove --original",
    )


def original_record(
    model: ModelFolder, held: FolderQuantization | None, original: Path | None
) -> Mapping[str, Any] | None:
    """Return name, path and identity of a result's original weights, or the folder's own record if they are missing."""
    folder = model.path if held is None else original
    if folder is None:
        return held.original if held is not None else None
    name = model.name if held is None else str(folder)
    return {"name": name, "path": str(folder), "identity": identity(folder)["sha256"]}


def _shape_difference(ours: Path, folder: Path, held: FolderQuantization) -> str:
    """Describe the first weight whose shape differs; empty when all match. Weights renamed by mlx-lm are skipped."""
    here, there = dense_shapes(ours) or {}, dense_shapes(folder)
    if there is None:
        return "its weights are packed in an unsupported way."
    names = [name for name in sorted(here) if held.spec.quantizer != "mlx" or name in there]
    wrong = [name for name in names if there.get(name) != here[name]]
    return f"{wrong[0]} is {there.get(wrong[0])} there and {here[wrong[0]]} here." if wrong else ""


def _identity_difference(model: ModelFolder, folder: Path, held: FolderQuantization) -> str:
    """Describe how the recorded identity differs from the folder's; empty when it matches."""
    known, found = (held.original or {}).get("identity"), identity(folder)["sha256"]
    source = source_identity(model.path)["weights"]
    if known is None and source != identity(model.path)["weights_sha256"]:
        known, found = source, source_identity(folder)["weights"]
    if known in (None, found):
        return ""
    return f"the recorded weights have the identity {known[:12]}, these have {found[:12]}."
