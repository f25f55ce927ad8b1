"""Import transformers without the packages that it imports only because they are installed.

Its model classes import hqq (which imports torch's compiler), scipy and accelerate for a few functions that most runs never
call. Here each such name is a stand-in that imports its package when it is first used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAMES = {
    "hqq.core.quantize": ("Quantizer",),
    "scipy.optimize": ("linear_sum_assignment",),
    "accelerate": ("dispatch_model", "PartialState"),
    "accelerate.hooks": ("add_hook_to_module", "AlignDevicesHook"),
    "accelerate.utils": (
        "get_max_memory",
        "extract_model_from_parallel",
        "get_balanced_memory",
        "infer_auto_device_map",
        "reduce",
    ),
    "accelerate.utils.modeling": ("clean_device_map", "get_max_layer_size"),
}
"""Module -> its names that transformers imports but does not use while it is imported."""

_MODULES = "transformers.modeling_utils", "transformers.generation.utils"


def import_transformers() -> None:
    """Import the model classes of transformers, once."""
    if all(name in sys.modules for name in _MODULES):
        return
    collects = gc.isenabled()
    gc.disable()  # an import makes little garbage, and searching it takes long
    try:
        with _stand_ins():
            for name in _MODULES:
                importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Within the context, importing a module of `_NAMES` gives a stand-in, unless it is missing or imported already."""
    packages = {name.partition(".")[0] for name in _NAMES}
    missing = {name for name in packages if name in sys.modules or find_spec(name) is None}
    stands = {
        name: _ModuleStandIn(name, names)
        for name, names in _NAMES.items()
        if name.partition(".")[0] not in missing
    }
    sys.modules.update(stands)
    try:
        yield
    finally:
        for stand in stands.values():
            stand.remove()


class _ModuleStandIn(ModuleType):
    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        super().__init__(name)
        if "." not in name:  # transformers looks for the package, and may import its other modules
            self.__spec__ = find_spec(name)
            self.__path__ = list(getattr(self.__spec__, "submodule_search_locations", None) or ())
        for each in names:
            setattr(self, each, _NameStandIn(name, each))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(self.__name__), name)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _NameStandIn:
    """A function or class that is imported when it is called or one of its attributes is read."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._load()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._load())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    def _load(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)
