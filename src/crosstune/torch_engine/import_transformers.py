"""Import transformers quickly: skip optional packages until they are used, and avoid repeated work.

Its model classes import hqq (which imports torch's compiler), scipy and accelerate for a few functions that most runs never
call. Here each such name is a stand-in that imports its package when it is first used. It also reads the source of all its
model classes twice and the file lists of all installed packages; here it gets the same answers sooner.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
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
    with without_collecting(), _stand_ins(), _quick_scans():
        for name in _MODULES:
            importlib.import_module(name)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Disable garbage collection within the context: an import creates little garbage, and collecting is slow."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # with unfreeze: imported objects count as old, so that the next small collection does not visit them
        gc.unfreeze()
        gc.enable()


@contextlib.contextmanager
def _quick_scans() -> Iterator[None]:
    """Within the context, transformers searches its folders and the installed packages quickly, if it is imported now."""
    find_packages, finder = importlib.metadata.packages_distributions, _Finder()
    importlib.metadata.packages_distributions = packages_distributions
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()
        importlib.metadata.packages_distributions = find_packages


def packages_distributions() -> Mapping[str, list[str]]:
    """Return the result of `importlib.metadata.packages_distributions`, without an object per file."""
    found = defaultdict(list)
    for each in importlib.metadata.distributions():
        declared, files = each.read_text("top_level.txt"), each.read_text("RECORD")
        if declared or files is None:
            names = set((declared or "").split())
        else:
            paths = (line.partition(",")[0] for line in files.splitlines())
            names = {path.partition("/")[0].removesuffix(".py") for path in paths if path.endswith(".py")}
        text = each.read_text("METADATA") or ""
        stated = text.partition("\nName:")[2].partition("\n")[0].strip() or each.metadata["Name"]
        for name in names:
            found[name].append(stated)
    return dict(found)


class _Finder:
    """Finds the module of transformers that scans folders, and lets it read a folder once and only the end of a file."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._run = spec.loader.exec_module
            spec.loader.exec_module = self._run_and_replace  # type: ignore[method-assign]
        return spec

    def _run_and_replace(self, module: ModuleType) -> None:
        self._run(module)
        quicker = {"create_import_structure_from_path": functools.cache, "fetch__all__": _on_last_lines}
        for name, make in quicker.items():
            if function := getattr(module, name, None):
                self._replaced.append((module, name, function))
                setattr(module, name, make(function))

    def restore(self) -> None:
        for module, name, function in self._replaced:
            setattr(module, name, function)


def _on_last_lines(function: Any) -> Any:
    """Return the function of a text for the lines from its last `__all__` on, which are all that it uses."""
    return lambda text: function(text[max(text.rfind("\n__all__"), 0) :])


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
