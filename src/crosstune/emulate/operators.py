"""Which operators have a kernel for a device, by torch's own table, which its wheel carries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

Support = Literal["kernel", "composite", "view", "none"]
"""A kernel of its own; written in other operators; the same and a view; or neither."""


@lru_cache(maxsize=2)
def operator_table(key: str) -> Mapping[str, Support]:
    """Every operator of `aten::` -> what the installed torch has for it on the device that dispatches as `key`.

    torch's own reader of the table knows what the file leaves unsaid: variants that are generated, functional
    forms that share the kernel of their `out` form, and operators without an entry, which are composite.
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
