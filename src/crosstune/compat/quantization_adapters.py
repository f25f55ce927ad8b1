"""Quantization adapters over the torch engine's quantizers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from crosstune.compat.quantization_config import (
    DTYPES,
    QuantizationConfig,
    QuantizationMethod,
    dtype_name,
    matches,
    method_for,
)
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec, read_quantizers, torch_quantizer_names
from crosstune.torch_engine.probe import torch_device, torch_dtype

HALF_TYPES = ("float16", "bfloat16")


def each_config(config: QuantizationConfig) -> list[QuantizationConfig]:
    """Return the configuration, and one for each entry of its `layer_configs`."""
    return [config, *(config.with_overrides(word, value) for word, value in config.layer_configs.items())]


def check_config(config: QuantizationConfig) -> None:
    """Raise a ValueError if no backend supports the configuration."""
    own = config.method.bits
    if own is not None and config.bits != own:
        better = method_for(config.method.library, config.bits)
        hint = f"use {better.name}" if better else f"use bits={own}"
        raise ValueError(f"{config.method.name} has {own} bits, not {config.bits}; {hint}.")
    if config.method.library == "hqq" and config.bits == 16:
        raise ValueError("HQQ does not support 16 bits; use NONE.")
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
        unused = _unused(config.with_overrides(word, asked))
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
    texts = [
        (name, f"{name}={getattr(config, name)} has no effect with {config.method.name}.")
        for name, is_unused in unused.items()
        if is_unused
    ]
    return texts + [
        ("backend_options", f"backend_options[{key!r}] has no effect: no backend has options.")
        for key in config.backend_options
    ]


def make_recipe(config: QuantizationConfig) -> Any:
    """Return the configuration as the torch engine describes it."""
    from crosstune.compat.torch_parts.replace_layers import LayerStorage

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


class QuantizationAdapter:
    """Quantizes torch models with one library according to its configuration; a subclass names the library."""

    library: ClassVar[str]

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        if config is None:
            method = next(method for method in QuantizationMethod if method.library == self.library)
            config = QuantizationConfig(method=method)
        if config.method.library != self.library:
            right = ADAPTERS[config.method.library].__name__
            raise ValueError(f"{type(self).__name__} does not support {config.method.name}; use {right}.")
        self.config = config
        self.adjustments: list[str] = []
        """Changes that `create_quantization_adapter` made to the requested configuration, with the reasons."""
        configs = each_config(config)
        for each in configs:
            check_config(each)
        for library in sorted({each.method.library for each in configs} & set(torch_quantizer_names())):
            _check_installed(library)
        for text in without_effect(config):
            _warn(text)

    def create_quantized_linear(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None
    ) -> Any:
        """Return a new quantized layer with torch's default initialization."""
        from crosstune.compat.torch_parts.replace_layers import new_layer

        place = None if device is None else torch_device(str(device))
        return new_layer(make_recipe(self.config), in_features, out_features, bias=bias, device=place)

    def quantize_model(self, model: Any) -> Any:
        """Replace the linear layers in place, on the model's device, and return the model."""
        from crosstune.compat.torch_parts.replace_layers import linear_names, replace_layers

        _check_patterns(self.config, linear_names(model))

        def choose(name: str) -> Any:
            config = self.config.for_layer(name)
            return None if config is None else make_recipe(config)

        done, shared = replace_layers(model, choose)
        for name in shared:
            _warn(f"{name} is not quantized: it shares its weight with the embedding.")
        if not done:
            raise ValueError(
                f"No layer of {type(model).__name__} was quantized: all its linear layers are skipped or already "
                "quantized."
            )
        return model

    def prepare_model_for_training(self, model: Any, use_gradient_checkpointing: bool = False) -> Any:
        """Freeze the model, so that adapters added to it can be trained."""
        from crosstune.compat.torch_parts.replace_layers import freeze_base

        freeze_base(model, checkpointing=use_gradient_checkpointing)
        return model

    def save_quantized_model(self, model: Any, path: str | Path) -> None:
        """Write a folder of safetensors and JSON."""
        from crosstune.compat.torch_parts.replaced_folder import save_quantized

        save_quantized(model, Path(path), config=self.config.to_json())

    def load_quantized_model(self, path: str | Path, model: Any = None, *, device: Any = None) -> Any:
        """Return the saved model, bit for bit. Unless it is from transformers, pass it newly built as `model`."""
        from crosstune.compat.torch_parts.replaced_folder import load_quantized, read_description

        saved = QuantizationMethod(read_description(Path(path))["config"]["method"])
        if saved.library != self.library:
            raise ValueError(
                f"The model in {path} was saved as {saved.name}; load it with {ADAPTERS[saved.library].__name__}."
            )
        return load_quantized(Path(path), model=model, device=torch_device(str(device or "cpu")))


class BitsAndBytesAdapter(QuantizationAdapter):
    """bitsandbytes: 4-bit NF4 or FP4, and 8-bit integers."""

    library = "bnb"


class HQQAdapter(QuantizationAdapter):
    """HQQ: group-wise integers of 1, 2, 3, 4 and 8 bits."""

    library = "hqq"


class QuantoAdapter(QuantizationAdapter):
    """optimum-quanto: integers of 2, 4 and 8 bits, and 8-bit floats."""

    library = "quanto"


class FallbackAdapter(QuantizationAdapter):
    """Store linear layers in 16 bits without quantization, whatever method the configuration names."""

    library = "none"

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        if config is not None and config.method.library != "none":
            if config.layer_configs:
                _warn("layer_configs has no effect: every layer is stored in 16 bits.")
            config = replace(config, method=QuantizationMethod.NONE, bits=16, layer_configs={})
        super().__init__(config)


class MLXAdapter(QuantizationAdapter):
    """Every method raises: MLX quantizes only MLX models. The error shows the command to use."""

    library = "mlx"

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        bits, group = self.config.bits, self.config.group_size
        raise UserError(
            f"{self.config.method.name} cannot be used on torch models.",
            why="MLX has its own arrays and its own models; its layers do not run inside torch.",
            do=f"train with MLX: crosstune train --backend mlx --train_type qlora --n_bits {bits} --group_size {group}; "
            "or use QuantizationMethod.HQQ or QUANTO_INT4, which run on Apple GPUs in torch",
        )

    create_quantized_linear = quantize_model = prepare_model_for_training = _refuse
    save_quantized_model = load_quantized_model = _refuse


ADAPTERS: dict[str, type[QuantizationAdapter]] = {
    "bnb": BitsAndBytesAdapter,
    "hqq": HQQAdapter,
    "quanto": QuantoAdapter,
    "mlx": MLXAdapter,
    "none": FallbackAdapter,
}


def replace_linear_with_quantized(
    model: Any, adapter: QuantizationAdapter, skip_modules: list[str] | None = None
) -> Any:
    """Quantize the model's linear layers in place, except those in `skip_modules` (default: the adapter's)."""
    if skip_modules is not None:
        adapter = type(adapter)(replace(adapter.config, skip_modules=list(skip_modules)))
    return adapter.quantize_model(model)


def _check_patterns(config: QuantizationConfig, names: list[str]) -> None:
    """Check that every pattern of the configuration matches a layer of this model, except the default lm_head."""
    quantized = [name for name in names if config.for_layer(name) is not None]
    for pattern in config.layer_configs:
        if not any(matches(pattern, name) for name in quantized):
            raise ValueError(f"layer_configs[{pattern!r}] matches no linear layer that is quantized.")
    for pattern in config.skip_modules:
        if pattern != "lm_head" and not any(matches(pattern, name) for name in names):
            _warn(f"skip_modules: {pattern!r} matches no linear layer of this model.")


def _check_installed(library: str) -> None:
    quantizer = read_quantizers()[library]
    top = quantizer.library.partition(".")[0]
    if find_spec(top) is None or find_spec(quantizer.library) is None:
        do = f"{quantizer.install_command}, or use a different method"
        raise UserError(f"{library} is not installed.", do=do)


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)
