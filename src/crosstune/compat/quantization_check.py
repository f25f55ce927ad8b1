"""Check a quantization configuration, and translate it for the torch engine."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from crosstune.compat.quantization_config import DTYPES, QuantizationConfig, dtype_name, method_for
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.core.quantizers import torch_quantizer_names
from crosstune.torch_engine.probe import torch_dtype

HALF_TYPES = ("float16", "bfloat16")


def each_config(config: QuantizationConfig) -> list[QuantizationConfig]:
    """Return the configuration and the ones in its `layer_configs`."""
    return [config, *(config.with_overrides(word) for word in config.layer_configs)]


def check_config(config: QuantizationConfig) -> None:
    """Raise a ValueError when no backend supports the configuration."""
    own = config.method.bits
    if own is not None and config.bits != own:
        better = method_for(config.method.library, config.bits)
        hint = f"use {better.name}" if better else f"use bits={own}"
        raise ValueError(f"{config.method.name} has {own} bits, not {config.bits}; {hint}.")
    if config.method.library == "hqq" and config.bits == 16:
        raise ValueError("HQQ has no 16 bits; use NONE.")
    if config.method.library in torch_quantizer_names() and find_spec("torch") is not None:
        from crosstune.torch_engine.quantized import open_quantizer

        spec = make_recipe(config).spec
        assert spec is not None
        try:
            # Any shape that the group size divides; the shapes of real layers are checked once there is a model.
            open_quantizer(spec).check(spec, (spec.group_size, spec.group_size))
        except UserError as error:
            raise ValueError(" ".join([error.message, error.do]).strip()) from error


def without_effect(config: QuantizationConfig) -> list[str]:
    """Return a warning for each option that was set but has no effect with its method."""
    texts = [text for _, text in _unused(config)]
    for word, asked in config.layer_configs.items():
        names = asked if isinstance(asked, Mapping) else ()
        unused = _unused(config.with_overrides(word))
        texts += [f"layer_configs[{word!r}]: {text}" for name, text in unused if name in names]
    return texts


def _unused(config: QuantizationConfig) -> list[tuple[str, str]]:
    default = QuantizationConfig()
    library, bits = config.method.library, config.bits
    grouped = library in ("hqq", "mlx") or (library == "quanto" and bits < 8)
    blocked = (library, bits) == ("bnb", 4)
    storage = dtype_name(config.storage_dtype)
    stored_as = (None, *HALF_TYPES) if library == "none" else (None, "uint8")
    unused = {
        "group_size": not grouped and config.group_size != default.group_size,
        "block_size": not blocked and config.block_size != default.block_size,
        "quant_type": library in ("mlx", "none") and config.quant_type != default.quant_type,
        "quant_scale": library != "hqq" and config.quant_scale,
        "storage_dtype": storage not in stored_as,
    }
    hints = {"group_size": ": block_size sets the size of its blocks"} if blocked else {}
    texts = [
        (
            name,
            f"{name}={getattr(config, name)} has no effect with {config.method.name}{hints.get(name, '')}.",
        )
        for name, is_unused in unused.items()
        if is_unused
    ]
    return texts + [
        ("backend_options", f"backend_options[{key!r}] has no effect: no backend has options.")
        for key in config.backend_options
    ]


def make_recipe(config: QuantizationConfig) -> Any:
    """Return the configuration as the torch engine describes it."""
    from crosstune.compat.torch_parts.layer_storage import LayerStorage

    library = config.method.library
    compute = _torch_type(config.compute_dtype)
    if library == "none":
        halves = [
            dtype for dtype in (config.storage_dtype, config.compute_dtype) if dtype_name(dtype) in HALF_TYPES
        ]
        return LayerStorage(compute=compute, kept_in=_torch_type(halves[0]) if halves else None)
    has_kind = (library, config.bits) == ("bnb", 4) or config.quant_type != "nf4"
    spec = QuantSpec(
        quantizer=library,
        bits=config.bits,
        group_size=config.block_size if library == "bnb" else config.group_size,
        kind=config.quant_type if has_kind else "auto",
        double=config.double_quant,
    )
    is_hqq = library == "hqq"
    return LayerStorage(
        spec=spec,
        compute=compute,
        small_zeros=is_hqq and config.quant_zero,
        small_scales=is_hqq and config.quant_scale,
    )


def _torch_type(dtype: Any) -> Any:
    name = dtype_name(dtype)
    return None if name is None else torch_dtype(DTYPES[name])
