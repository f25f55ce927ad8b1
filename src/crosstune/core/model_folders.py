"""Define an engine's operations on model folders; `open_folders(plan)` of each engine returns its implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.quantization import QuantSpec

OnBytes = Callable[[int, int], None]
"""Receives the bytes done and the total."""
PLAIN_BITS = 16
"""MLX: the weights are not quantized."""


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """An adapter in PEFT's layout; `settings` is its adapter_config.json."""

    path: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """The dense weights of a model folder, with `adapter` merged into them when it is given."""

    folder: Path
    adapter: AdapterFolder | None = None
    quantization: QuantSpec | None = None
    """Quantize and dequantize each weight like this, as in training. None uses the values of the folder."""
    precision: str = "fp32"
    """The precision used to train on the quantized weights."""
    new_blocks: frozenset[int] = frozenset()
    """Blocks that training added and never quantized."""
    dtype: str = "auto"
    """The dtype of all weights; auto keeps each stored dtype."""


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """The storage of a folder's weights. `quantizer` is "none" for plain weights in `dtype`."""

    quantizer: str
    bits: int = 4
    group_size: int = 64
    kind: str = "auto"
    double: bool = True
    dtype: str = "auto"

    @property
    def name(self) -> str:
        """Return the name suffix of such folders."""
        if self.quantizer == "none":
            return "plain"
        is_dense = self.quantizer == "mlx" and self.bits == PLAIN_BITS
        return self.quantizer if is_dense else f"{self.quantizer}-{self.bits}bit"

    def spec(self) -> QuantSpec:
        """Return the quantization; only for a form that is not plain."""
        return QuantSpec(**{name: value for name, value in vars(self).items() if name != "dtype"})


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A request to write a model folder in a different form."""

    source: Path
    """The weights to start from."""
    form: WeightForm
    tokenizer: Path
    """The folder to copy tokenizer files from."""
    replaced: Path | None = None
    """The quantized folder that the result replaces, when `source` is its original; it determines the quantized layers."""
    original: Mapping[str, Any] | None = None
    """Name, path and identity of the original weights, recorded in a quantized folder."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An engine's report on a folder that it has written."""

    errors: Mapping[str, Any] | None = None
    """The difference from the source's weights, when the engine measures it while writing."""
    warnings: list[str] = field(default_factory=list)


class ModelFolders(Protocol):
    """An engine's operations on model folders, on the device and in the precision of its plan."""

    reader: str
    """The library that loads folders for `logits`."""
    own_quantizer: str | None
    """The quantizer whose folders `logits` and `weight_errors` read; None: plain folders and those a session opens."""
    reads_gguf: bool
    """True if `logits` reads GGUF files."""
    folds_sessions: bool
    """True if `write_dense` merges the layers of an open session instead of reading the adapter's files."""

    def check_adapter(self, weights: DenseWeights) -> None:
        """Raise a UserError when the adapter's layers do not match the folder's."""

    def check_form(self, form: WeightForm) -> None:
        """Raise a UserError when the engine cannot write the form on this machine."""

    def ignored_window(self, folder: Path) -> int | None:
        """Return the sliding window of the model if the library does not apply it; raise if it cannot run the model."""

    def logits(self, folder: Path, prompts: Prompts, *, gguf: str | None = None) -> Logits:
        """Return the logits of a folder, or of the GGUF file `gguf` in it, as `reader` loads it."""

    def input_squares(
        self, folder: Path, rows: Prompts, *, show: Callable[[int, int], None]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the mean squares of every linear layer's inputs over the tokens of `rows`, by the name of the layer."""

    def variant_logits(
        self, folder: Path, prompts: Prompts, variants: Mapping[str, DenseWeights]
    ) -> tuple[Logits, dict[str, Logits]]:
        """Return the folder's logits, and the logits with each variant's weights if the engine can swap weights."""

    def weight_errors(self, folder: Path, original: Path) -> Mapping[str, Any]:
        """Return the errors of a folder's quantized weights; `relative` is over all weights."""

    def write_dense(
        self, target: Path, weights: DenseWeights, *, session: Any = None, on_bytes: OnBytes | None = None
    ) -> None:
        """Write a plain model folder. With `folds_sessions`, `session` has the adapter loaded on the weights."""

    def result_bytes(self, rewrite: Rewrite) -> int:
        """Estimate the disk space that `rewrite_folder` needs."""

    def rewrite_folder(
        self, target: Path, rewrite: Rewrite, *, scratch: Path, on_bytes: OnBytes | None = None
    ) -> Written:
        """Write a model folder in a different form. `scratch` is an existing folder for temporary files."""

    def readable(self, folder: Path, *, view: Path) -> Path:
        """Return the folder, or `view` with links to its files and a config.json that `reader` understands."""
