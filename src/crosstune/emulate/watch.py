"""Record the operators that a session runs on the CPU, and their support on a different device."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosstune.config.options.hardware import EMULATED_PACKAGE
from crosstune.core.names import load_plugin
from crosstune.torch_engine.quantized import QuantLinear, dense_weight, quantize_weight
from crosstune.torch_engine.session.session import TorchSession

_MARK = "crosstune.layer"
_COMPOSITE_KEYS = (
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)
_SKIPPED_FRAMES = (str(Path(torch.__file__).parent), __file__)

Support = Literal["kernel", "composite", "view", "none"]
"""The device has a kernel; composed of other operators; composed and a view; or not supported."""


Row = dict[str, Any]
"""An operator, where it was called first (`where`), what the device does with it (`what`), and its number of `calls`."""


class Watch:
    """Run code on the CPU and record the operators and dtypes that the emulated device does not support."""

    def __init__(self, name: str, *, quantizer: str, environment: Mapping[str, str]) -> None:
        self.device: ModuleType = load_plugin(EMULATED_PACKAGE, name, kind="emulated backend")
        part = self.device.PARTS.get(quantizer)
        if part is not None and importlib.util.find_spec(part) is not None:
            importlib.import_module(part)
        self.falls_back = environment.get(self.device.FALLBACK, "0") != "0"
        self.operators: dict[str, int] = {}
        """Operator -> calls."""
        self.refused: dict[tuple[str, str], Row] = {}
        """Results in a dtype that the device does not support."""
        self.fallen_back: dict[str, Row] = {}
        self.failing: dict[str, Row] = {}
        """No kernel, and no fallback to the CPU."""
        self.custom: dict[str, Row] = {}
        """Operators of other libraries that have a kernel for the device."""
        self.dtypes: set[torch.dtype] = set()
        self.noted: set[torch.dtype] = set()
        """Result dtypes already recorded for the current call: its component operators do not count again."""

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the operators in the `with` block; `phase` is its name in the recorded locations."""
        with (
            torch.compiler.set_stance("force_eager"),
            sdpa_kernel(self.device.ATTENTION),
            _CurrentLayer() as layer,
            _Mode(self, phase, layer),
        ):
            yield

    def check_loaded(self, session: TorchSession) -> None:
        """Record the dtypes of a loaded model. It is built on the host; only quantization runs on the device, so one layer
        is quantized again and recorded."""
        model = session.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._note_dtype("copy to the device", tensor.dtype, name)
        spec = session.plan.quant_spec
        layer = next((module for module in model.modules() if isinstance(module, QuantLinear)), None)
        if spec is not None and layer is not None:
            precision = session.precision
            weight = dense_weight(layer, precision.weights)
            with self.during("quantizing"):
                quantize_weight(weight, spec, precision.autocast or precision.weights)

    def note_result(self, operator: str, result: Any, inputs: Any, where: Any) -> None:
        computed = any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in tree_leaves(inputs))
        # A scalar that was not computed from tensors stays on the host, which supports every dtype.
        dtypes = {
            leaf.dtype
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and (leaf.ndim or computed)
        }
        for dtype in dtypes - self.noted:
            self._note_dtype(operator, dtype, where)
        self.noted |= dtypes

    def _note_dtype(self, operator: str, dtype: torch.dtype, where: Any) -> None:
        self.dtypes.add(dtype)
        if dtype in self.device.REFUSED:
            what = str(dtype).removeprefix("torch.")
            count(self.refused, (operator, what), operator, where, what=what)

    def support(self, operator: Any) -> str:
        """Return the support of an operator; `own` for a kernel of another library."""
        name = operator.name()
        known = operator_table(self.device.KEY).get(name)
        if known is not None:
            return known
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, self.device.KEY):
            return "own"
        return "composite" if _composite_key(name) is not None else "none"

    def note_missing(self, operator: Any, where: Any) -> None:
        name = operator.name()
        if not self.falls_back:
            why = f"{self.device.FALLBACK} is 0"
        elif name.startswith(self.device.NEVER_FALL_BACK):
            why = "a collective cannot fall back to the CPU"
        elif operator.is_view:
            why = "a view cannot share memory with the CPU"
        else:
            what = f"{self.device.FALLBACK}=1 runs it on the CPU, which is slow"
            count(self.fallen_back, name, name, where, what=what)
            return
        count(self.failing, name, name, where, what=why)


class _CurrentLayer:
    """Track the running layer of every model called in the `with` block.

    Autograd does not record the layer of a node. So each layer marks the node of its output, and the last mark passed in
    the backward pass identifies the nearest layer.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._near = ""

    def __enter__(self) -> _CurrentLayer:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def follow(self) -> None:
        """Update the position; call it at every operator."""
        node = torch._C._current_autograd_node()
        self._near = node.metadata.get(_MARK, self._near) if node is not None else ""

    def describe(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._stack:
            return f"{', recomputed for the backward pass' if in_backward else ''}: {self._stack[-1]}"
        if in_backward:
            return f", backward: {f'near {self._near}' if self._near else 'at the loss'}"
        return ": outside the model"

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._stack and id(module) not in self._names:
            self._names |= {id(part): name for name, part in module.named_modules() if name}
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._stack.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.metadata.setdefault(_MARK, name)


class _Mode(TorchDispatchMode):
    """Record the operators below autograd; decompose the same operators as the device, and record their components."""

    def __init__(self, watch: Watch, phase: str, layer: _CurrentLayer) -> None:
        super().__init__()
        self.watch, self.phase, self.layer = watch, phase, layer
        self.outer = ""
        """The operator that the program called, while its components run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _numbers_as_tensors(func, args), kwargs or {}
        name, watch = func.name(), self.watch
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors) or name.startswith("profiler::"):
            return func(*args, **kwargs)
        self.layer.follow()
        if not self.outer:
            watch.noted = set()
        watch.operators[name] = watch.operators.get(name, 0) + 1
        support, key = watch.support(func), None
        if support == "own":
            key = None if watch.device.is_present() else watch.device.KEY
            count(watch.custom, name, name, self._where, what=watch.device.OWN_KERNEL)
        elif support == "composite":
            key = _composite_key(name)
            if not name.startswith("aten::"):
                count(watch.custom, name, name, self._where, what=watch.device.COMPOSITE)
        elif support == "none":
            watch.note_missing(func, self._where)
        if key is None:
            result = func(*args, **kwargs)
        else:
            result = self._decompose(func, key, args, kwargs)
        watch.note_result(self.outer or name, result, (args, kwargs), self._where)
        return result

    def _decompose(self, func: Any, key: str, args: Any, kwargs: Any) -> Any:
        before, self.outer = self.outer, self.outer or func.name()
        try:
            with self:
                return func._op_dk(torch._C._dispatch_key_parse(key), *args, **kwargs)
        finally:
            self.outer = before

    def _where(self) -> str:
        """Return the innermost running layer, and the line outside torch that called the operator."""
        return f"{self.phase}{self.layer.describe()} ({_caller()})"


def _numbers_as_tensors(func: Any, args: Any) -> Any:
    """Turn numbers for tensor arguments into tensors: not every operator accepts plain numbers."""
    if torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]):
        return args
    return tuple(
        torch.tensor(value)
        if isinstance(value, (int, float, complex)) and isinstance(argument.type, torch.TensorType)
        else value
        for value, argument in zip(args, func._schema.arguments, strict=False)
    )


def count(found: dict[Any, Row], key: Any, operator: str, where: Any, *, what: str) -> None:
    """Count one more call; the location is computed only for the first."""
    if key not in found:
        place = where() if callable(where) else where
        found[key] = {"operator": operator, "where": place, "what": what, "calls": 0}
    found[key]["calls"] += 1


def _composite_key(name: str) -> str | None:
    """Return the dispatch key of the composite kernel for a device without its own kernel, if there is one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((key for key in _COMPOSITE_KEYS if has(name, key)), None)


def _caller() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_FRAMES):
        frame = frame.f_back
    if frame is None:
        return "torch"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@lru_cache(maxsize=2)
def operator_table(key: str) -> Mapping[str, Support]:
    """Return each `aten::` operator and its support on the device with dispatch key `key`.

    torchgen reads the table of the installed torch. It covers generated variants, functional variants that share the
    kernel of their `out` variant, and operators without an entry, which are composite.
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
