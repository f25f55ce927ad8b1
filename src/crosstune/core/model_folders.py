"""Define what an engine does with model folders: read, fold, write, and compute logits.

`crosstune.<engine>_engine.model_folders.open_folders(plan)` returns the implementation of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.quantization import QuantSpec

OnBytes = Callable[[int, int], None]
"""Receives how many of how many bytes are done."""
PLAIN_BITS = 16
"""MLX: the weights are not quantized."""


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """An adapter in PEFT's layout; `settings` is its adapter_config.json."""

    path: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """The weights of a model folder made dense, with an adapter folded into them where one is given."""

    folder: Path
    adapter: AdapterFolder | None = None
    quantization: QuantSpec | None = None
    """Quantize each weight like this and make it dense again, as training saw it. None: take the folder's own values."""
    precision: str = "fp32"
    """The precision of the training that saw the weights quantized."""
    new_blocks: frozenset[int] = frozenset()
    """Blocks that training added and never quantized."""
    dtype: str = "auto"
    """The number format of all weights; auto keeps the one in which the folder stores each of them."""


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """How a folder stores its weights: `quantizer` is none for plain weights in `dtype`."""

    quantizer: str
    bits: int = 4
    group_size: int = 64
    kind: str = "auto"
    double: bool = True
    dtype: str = "auto"

    @property
    def name(self) -> str:
        """Return the suffix for folders of this form."""
        if self.quantizer == "none":
            return "plain"
        is_dense = self.quantizer == "mlx" and self.bits == PLAIN_BITS
        return self.quantizer if is_dense else f"{self.quantizer}-{self.bits}bit"

    def spec(self) -> QuantSpec:
        """Return the quantization of this form, which is not plain."""
        return QuantSpec(
            quantizer=self.quantizer,
            bits=self.bits,
            group_size=self.group_size,
            kind=self.kind,
            double=self.double,
        )


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A model folder to be written in another form."""

    source: Path
    """The weights to start from."""
    form: WeightForm
    tokenizer: Path
    """The folder that the tokenizer files come from."""
    replaced: Path | None = None
    """The quantized folder that the result stands in for, when `source` is its original; it chooses the layers."""
    original: Mapping[str, Any] | None = None
    """Name, path and identity of the original weights, for the record of a quantized folder."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What an engine reports about a folder it has written."""

    errors: Mapping[str, Any] | None = None
    """The difference to the source's weights, where the engine measures it while writing."""
    warnings: list[str] = field(default_factory=list)


class ModelFolders(Protocol):
    """An engine's operations on model folders, on the device and in the precision it was opened for."""

    reader: str
    """The library that loads folders for `logits`."""
    own_quantizer: str | None
    """The quantizer whose folders `logits` and `weight_errors` read; None: plain ones, and those that a session opens."""
    folds_sessions: bool
    """Whether `write_dense` folds the layers of an open session instead of reading the adapter's files."""

    def check_adapter(self, weights: DenseWeights) -> None:
        """Raise a UserError when the adapter's layers are not those of the folder."""
        ...

    def check_form(self, form: WeightForm) -> None:
        """Raise a UserError when the engine cannot write the form here."""
        ...

    def logits(self, folder: Path, prompts: Prompts, *, gguf: str | None = None) -> Logits:
        """Return the logits of a folder, or of the GGUF file `gguf` in it, as `reader` loads it."""
        ...

    def variant_logits(
        self, folder: Path, prompts: Prompts, variants: Mapping[str, DenseWeights]
    ) -> tuple[Logits, dict[str, Logits]]:
        """Return the folder's logits, and those of its model with other weights where the engine can exchange them."""
        ...

    def weight_errors(self, folder: Path, original: Path) -> Mapping[str, Any]:
        """Return how far a folder's quantized weights are from the original ones; `relative` is over all of them."""
        ...

    def write_dense(
        self, target: Path, weights: DenseWeights, *, session: Any = None, on_bytes: OnBytes | None = None
    ) -> None:
        """Write a plain model folder. `session` has the adapter loaded over the weights, for `folds_sessions`."""
        ...

    def result_bytes(self, rewrite: Rewrite) -> int:
        """Return about how much disk space `rewrite_folder` needs."""
        ...

    def rewrite_folder(
        self, target: Path, rewrite: Rewrite, *, scratch: Path, on_bytes: OnBytes | None = None
    ) -> Written:
        """Write a model folder in another form. `scratch` is an existing folder for temporary files."""
        ...

    def readable(self, folder: Path, *, view: Path) -> Path:
        """Return the folder, or `view` with links to its files and a config.json that `reader` understands."""
        ...
