"""Look up which operators have a kernel for a device, in the operator table of the installed torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

Support = Literal["kernel", "composite", "view", "none"]
"""The device has a kernel; composed of other operators; composed and a view; or not supported."""


@lru_cache(maxsize=2)
def operator_table(key: str) -> Mapping[str, Support]:
    """Return every `aten::` operator -> its support in the installed torch on the device with dispatch key `key`.

    The table is read with torchgen, which also covers what the file leaves implicit: generated variants, functional
    variants that share the kernel of their `out` variant, and operators without an entry, which are composite.
    """
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    kernels = parsed.backend_indices[DispatchKey[key]]
    functions = {str(function.func.name): function for function in parsed.native_functions}

    def support(name: str) -> Support:
        function = functions[name]
        delegate = function.structured_delegate
        if kernels.has_kernel(function) or (delegate and kernels.has_kernel(functions[str(delegate)])):
            return "kernel"
        if function.has_composite_kernel:
            return "view" if function.is_view_op else "composite"
        return "none"

    return {f"aten::{name}": support(name) for name in functions}
