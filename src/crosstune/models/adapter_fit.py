"""Check that an adapter fits a model folder, from the safetensors headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.safetensors_header import read_header
from crosstune.models.adapter_files import PEFT_PREFIX, PEFT_WEIGHTS
from crosstune.models.mlx_adapters import MLX_WEIGHTS, adapter_form
from crosstune.models.quantized_folder import dense_shapes

Shape = tuple[int, ...]


def check_adapter_fit(adapter: Path, base: Path) -> None:
    """Check that every layer of the adapter has a weight of its shape in the base. Packed weights that only
    transformers can read are not checked."""
    shapes, layers = dense_shapes(base), _layer_shapes(adapter)
    if shapes is None:
        return
    wrong = [
        f"{layer} is {shape} there and {found} here"
        for layer, shape in sorted(layers.items())
        if (found := _find(layer, shapes)) not in (shape, shape[::-1])  # GPT-2 stores weights transposed
    ]
    if wrong:
        raise UserError(
            f"The adapter {adapter} does not fit the base {base}.",
            why=f"{len(wrong)} of {len(layers)} layers differ: {wrong[0]}.",
            do="give the base it was trained on with --original",
        )


def _layer_shapes(adapter: Path) -> dict[str, Shape]:
    """Return layer -> the shape of the weight that the adapter changes."""
    is_mlx = adapter_form(adapter) == "mlx"
    header = read_header(adapter / (MLX_WEIGHTS if is_mlx else PEFT_WEIGHTS)).tensors
    parts = {name.removeprefix(PEFT_PREFIX): tuple(entry["shape"]) for name, entry in header.items()}
    first, second = (".lora_a", ".lora_b") if is_mlx else (".lora_A.weight", ".lora_B.weight")
    found: dict[str, Shape] = {}
    for name, shape in parts.items():
        layer = name.removesuffix(first)
        if layer != name and layer + second in parts:
            other = parts[layer + second]
            found[layer] = (other[-1], shape[0]) if is_mlx else (other[0], shape[-1])
    return found


def _find(layer: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of a layer's weight. In some files all names lack the first part."""
    name = f"{layer}.weight"
    if name in shapes:
        return shapes[name]
    return next((shapes[other] for other in shapes if name.endswith(f".{other}")), None)
