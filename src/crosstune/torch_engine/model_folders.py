"""Implement core.model_folders.ModelFolders with torch and transformers, and measure which inputs of a layer matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.model_folders import DenseWeights, ModelFolders, OnBytes, Rewrite, WeightForm, Written
from crosstune.models.quantized_folder import stored_format
from crosstune.torch_engine.device import PRECISIONS, Precision, open_device
from crosstune.torch_engine.loading.prequantized import read_prequantized
from crosstune.torch_engine.quantized import open_quantizer
from crosstune.torch_engine.results import verify
from crosstune.torch_engine.results.convert import Conversion, measure_errors
from crosstune.torch_engine.results.merge import (
    DTYPES,
    BaseTensors,
    check_layers,
    dense_tensors,
    read_adapter,
    write_dense,
)


def open_folders(plan: Plan | None = None) -> ModelFolders:
    """Return the operations on the plan's device in its precision; without a plan, on the CPU in fp32."""
    if plan is None:
        return TorchFolders(torch.device("cpu"), PRECISIONS["fp32"])
    return TorchFolders(open_device(plan.backend), PRECISIONS[plan.precision])


class TorchFolders:
    """Operations on model folders on one device."""

    reader = "transformers"
    own_quantizer: str | None = None
    reads_gguf = True
    folds_sessions = False

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device, self.precision = device, precision

    def check_adapter(self, weights: DenseWeights) -> None:
        if weights.adapter is not None:
            base = BaseTensors(DenseWeights(folder=weights.folder))
            check_layers(base, read_adapter(weights.adapter, base))

    def check_form(self, form: WeightForm) -> None:
        if form.quantizer != "none":
            open_quantizer(form.spec())

    def ignored_window(self, folder: Path) -> int | None:
        return None

    def logits(self, folder: Path, prompts: Prompts, *, gguf: str | None = None) -> Logits:
        return self._logits(
            verify.load_plainly(folder, self.precision, device=self.device, gguf=gguf), prompts
        )

    def input_squares(
        self, folder: Path, rows: Prompts, *, show: Callable[[int, int], None]
    ) -> dict[str, NDArray[np.float32]]:
        model = verify.load_plainly(folder, self.precision, device=self.device)
        return input_squares(model, rows, device=self.device, show=show)

    def variant_logits(
        self, folder: Path, prompts: Prompts, variants: Mapping[str, DenseWeights]
    ) -> tuple[Logits, dict[str, Logits]]:
        """Load the model once and replace its weights for each variant."""
        model = verify.load_plainly(folder, self.precision, device=self.device)
        reference, found = self._logits(model, prompts), dict[str, Logits]()
        for name, weights in variants.items():
            for _, tensors in dense_tensors(BaseTensors(weights, self.device)):
                verify.replace_weights(model, tensors)
            found[name] = self._logits(model, prompts)
        return reference, found

    def weight_errors(self, folder: Path, original: Path) -> Mapping[str, Any]:
        prequantized = read_prequantized(folder)
        assert prequantized is not None, f"{folder} contains plain weights"
        return measure_errors(prequantized, original, self.device).to_json()

    def write_dense(
        self, target: Path, weights: DenseWeights, *, session: Any = None, on_bytes: OnBytes | None = None
    ) -> None:
        write_dense(target, weights, device=self.device, on_read=on_bytes)

    def result_bytes(self, rewrite: Rewrite) -> int:
        return self._conversion(rewrite).result_bytes()

    def rewrite_folder(
        self, target: Path, rewrite: Rewrite, *, scratch: Path, on_bytes: OnBytes | None = None
    ) -> Written:
        conversion = self._conversion(rewrite)
        conversion.write(target, tokenizer=rewrite.tokenizer, original=rewrite.original, on_read=on_bytes)
        return Written(errors=conversion.errors.to_json())

    def readable(self, folder: Path, *, view: Path) -> Path:
        return folder

    def _logits(self, model: Any, prompts: Prompts) -> Logits:
        return verify.model_logits(model, prompts, precision=self.precision, device=self.device)

    def _conversion(self, rewrite: Rewrite) -> Conversion:
        form = rewrite.form
        replaced = read_prequantized(rewrite.replaced) if rewrite.replaced is not None else None
        return Conversion(
            start=rewrite.source,
            device=self.device,
            spec=form.spec() if form.quantizer != "none" else None,
            dtype=DTYPES[form.dtype if form.dtype != "auto" else stored_format(rewrite.source)],
            replaced=replaced,
        )


def input_squares(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    device: torch.device,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, NDArray[np.float32]]:
    """Return the mean squares of every linear layer's inputs, by the name of the layer. Rows of one length share a pass."""
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0.0) + values.square().sum(0)

        return add

    handles = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    done = 0
    try:
        with torch.inference_mode():
            for group in verify.passes(sorted(rows, key=len), padded=False):
                model(input_ids=torch.tensor([list(row) for row in group], device=device))
                done += len(group)
                show(done, len(rows))
    finally:
        for handle in handles:
            handle.remove()
    count = sum(len(row) for row in rows)
    return {name: (total / count).float().cpu().numpy() for name, total in sums.items()}
