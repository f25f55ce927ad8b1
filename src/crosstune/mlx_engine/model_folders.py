"""Implement core.model_folders.ModelFolders with MLX and mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.model_folders import (
    PLAIN_BITS,
    DenseWeights,
    ModelFolders,
    OnBytes,
    Rewrite,
    WeightForm,
    Written,
)
from crosstune.mlx_engine import export
from crosstune.mlx_engine.merge import write_merged
from crosstune.mlx_engine.quant import mlx as quant_limits
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.folder import weight_files
from crosstune.models.quantized_folder import read_quantization

_SPARE_BYTES = 50_000_000


def open_folders(plan: Plan | None = None) -> ModelFolders:
    """Return the operations; MLX has one device, and mlx-lm reads a folder in the precision it is stored in."""
    return MlxFolders()


class MlxFolders:
    reader = "mlx-lm"
    own_quantizer: str | None = "mlx"
    folds_sessions = True

    def check_adapter(self, weights: DenseWeights) -> None:
        """Do nothing: the session checked its adapter when it was opened."""

    def check_form(self, form: WeightForm) -> None:
        assert form.quantizer in ("none", "mlx"), form.quantizer
        if form.quantizer == "mlx" and form.bits != PLAIN_BITS:
            quant_limits.check_form(bits=form.bits, group_size=form.group_size)

    def logits(self, folder: Path, prompts: Prompts, *, gguf: str | None = None) -> Logits:
        assert gguf is None, "mlx-lm does not read GGUF files"
        return export.mlx_lm_logits(folder, prompts)

    def variant_logits(
        self, folder: Path, prompts: Prompts, variants: Mapping[str, DenseWeights]
    ) -> tuple[Logits, dict[str, Logits]]:
        """Return only the folder's logits: weights merged by a session cannot be put into mlx-lm's model."""
        return self.logits(folder, prompts), {}

    def weight_errors(self, folder: Path, original: Path) -> Mapping[str, Any]:
        return {"relative": export.weights_error(folder, original)}

    def write_dense(
        self, target: Path, weights: DenseWeights, *, session: Any = None, on_bytes: OnBytes | None = None
    ) -> None:
        if weights.adapter is None:
            export.write_plain(weights.folder, target, dtype=weights.dtype)
            return
        write_merged(
            target,
            weights.folder,
            session,
            dequantized=weights.quantization is not None,
            dtype=weights.dtype,
            on_write=on_bytes,
        )

    def result_bytes(self, rewrite: Rewrite) -> int:
        num_bytes = sum(path.stat().st_size for path in weight_files(rewrite.source))
        growth = 2 if read_quantization(rewrite.source) is None else 8  # 16 bits to 32, or 4
        return growth * num_bytes + _SPARE_BYTES

    def rewrite_folder(
        self, target: Path, rewrite: Rewrite, *, scratch: Path, on_bytes: OnBytes | None = None
    ) -> Written:
        warnings: list[str] = []
        if rewrite.form.quantizer == "none":
            export.write_plain(rewrite.source, target, dtype=rewrite.form.dtype)
        else:
            warnings = self._write_mlx(target, rewrite, scratch)
        if rewrite.tokenizer != rewrite.source:
            copy_tokenizer(rewrite.tokenizer, target)
        return Written(warnings=warnings)

    def readable(self, folder: Path, *, view: Path) -> Path:
        return export.make_view(folder, view)

    def _write_mlx(self, target: Path, rewrite: Rewrite, scratch: Path) -> list[str]:
        """Write the folder with mlx-lm, which quantizes only dense weights."""
        source, form = rewrite.source, rewrite.form
        if read_quantization(source) is not None:
            source = scratch / "plain"
            export.write_plain(rewrite.source, source, dtype="auto")
        view = self.readable(source, view=scratch / "respelled")
        return export.convert_folder(view, target, bits=form.bits, group_size=form.group_size)
