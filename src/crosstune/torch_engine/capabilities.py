"""Find by trial what a torch device supports: dtypes, bf16 speed, attention, Triton, collectives, quantizers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

from crosstune.core.names import load_plugin
from crosstune.core.quantization import QuantSpec
from crosstune.torch_engine.quantized import QUANT_PACKAGE, QuantLinear, quantize_weight

FAILURES = (ImportError, RuntimeError, AssertionError, ValueError, TypeError, AttributeError, OSError)
"""Exceptions that libraries raise for unsupported operations. NotImplementedError is a RuntimeError."""

DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})
_TOLERANCE = {"fp32": 2e-3, "fp16": 1e-2, "bf16": 5e-2}
# Relative error of a matmul with a quantized weight: several times the error measured on Gaussian weights.
_QUANTIZED_TOLERANCE = {8: 0.05, 4: 0.2, 3: 0.3, 2: 0.6, 1: 1.5}
_WIDTH = 128
_GROUP_SIZE = 64

Notes = list[str]
_TOO_SLOW = 0.2
"""Stop timing larger matmuls once bf16 reaches less than this fraction of the fp32 speed."""
_SAMPLE_S, _BUDGET_S, _MAX_ROUNDS = 0.004, 0.1, 15
"""Seconds per sample and in total, and the most rounds; at least three rounds are timed."""


def works(what: str, notes: Notes, trial: Callable[..., Any], *arguments: Any) -> bool:
    """Run a trial; return True if it succeeded, otherwise append the reason to `notes`."""
    try:
        # A probe must not change the random state of a run.
        with _quiet(), torch.random.fork_rng(devices=[]):
            trial(*arguments)
    except FAILURES as error:
        lines = str(error).strip().splitlines()
        notes.append(f"{what}: {lines[0] if lines else type(error).__name__}")
        return False
    return True


def working_dtypes(device: str, *, notes: Notes) -> tuple[str, ...]:
    return tuple(name for name in DTYPES if works(f"{name} does not work", notes, _try_dtype, device, name))


def _try_dtype(device: str, name: str) -> None:
    """Compare a matmul and its gradients with float64 on the CPU."""
    operands = [_random(48, 48, seed=seed).to(DTYPES[name]) for seed in range(3)]
    results = _product_with_gradients(*(operand.to(device) for operand in operands))
    references = _product_with_gradients(*(operand.double() for operand in operands))
    for result, reference in zip(results, references, strict=True):
        error = float((result.cpu().double() - reference).abs().max() / reference.abs().max())
        if not error <= _TOLERANCE[name]:
            raise ValueError(f"a small matmul differs from float64 by {error:.1%}")


def _product_with_gradients(left: Any, right: Any, weight: Any) -> tuple[Any, Any, Any]:
    left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
    product = left @ right
    (product * weight).sum().backward()
    return product.detach(), left.grad, right.grad


@functools.cache
def bf16_speedup(device: str) -> float:
    """Return the time of an fp32 matmul divided by the time of a bf16 matmul.

    A CPU without bf16 arithmetic can be a thousand times slower, so small matmuls are timed first; a GPU needs a large
    one. Cached, so that all plans of a process agree.
    """
    for size in (64, 256, 1024) if device == "cpu" else (2048,):
        ratio = _time_ratio(device, size)
        if ratio < _TOO_SLOW:
            break
    return ratio


def _time_ratio(device: str, size: int) -> float:
    """Return the median ratio of several rounds. Both sides of a round see the same load of the machine."""
    operands = [_random(size, size).to(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    matmuls = [partial(torch.mm, operand, operand) for operand in operands]
    for matmul in matmuls:
        mean_s(matmul, operands[0].device)  # loads kernels
    counts = [max(1, round(_SAMPLE_S / mean_s(matmul, operands[0].device))) for matmul in matmuls]
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < _MAX_ROUNDS and (len(ratios) < 3 or time.perf_counter() - start < _BUDGET_S):
        fp32_s, bf16_s = (
            mean_s(matmul, operands[0].device, count) for matmul, count in zip(matmuls, counts, strict=True)
        )
        ratios.append(fp32_s / bf16_s)
    return float(f"{statistics.median(ratios):.3g}")


def mean_s(work: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Return the mean time of `count` calls on a device."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize()
    return (time.perf_counter() - start) / count


def working_attention(device: str, dtype: torch.dtype, *, notes: Notes) -> tuple[str, ...]:
    """Return the attention kernels of torch that ran forward and backward, and flash_attn if that package works."""
    labels = {
        kernel: name.removesuffix("_ATTENTION").lower() for name, kernel in SDPBackend.__members__.items()
    }
    del labels[SDPBackend.ERROR]
    found = []
    for kernel, label in sorted(labels.items(), key=lambda item: item[1] == "math"):
        # Kernels for other devices are expected to fail; only a missing flash kernel is worth a note.
        noted = notes if label == "flash" else []
        if works(f"{label} attention does not run", noted, _try_attention, device, dtype, label, kernel):
            found.append(label)
    if device == "cuda" and works("flash_attn", [], _try_flash_package, device, dtype):
        found.append("flash_attn")
    return tuple(found)


def runs_triton(device: str, *, notes: Notes) -> bool:
    """Return True if a kernel of the fast layers compiles and runs: Triton also needs a C compiler."""
    return works("Triton kernels do not run", notes, _try_triton, device)


def _try_triton(device: str) -> None:
    from crosstune.torch_engine.kernels.operations import Norm
    from crosstune.torch_engine.kernels.triton_operations import rms_norm

    rows = _random(4, 64).to(device)
    _check_finite(
        rms_norm(rows, None, Norm(torch.ones_like(rows[0]), 1e-6), torch.empty_like(rows))[2].values
    )


def _try_attention(device: str, dtype: torch.dtype, label: str, kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):
        attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        output = _attend(attend, device, dtype, 1, 4, 64, 64)
    # MPS ignores the chosen kernel; the name of the backward function shows which one ran.
    ran = output.grad_fn.name() if output.grad_fn is not None else ""
    if label != "math" and label.capitalize() not in ran:
        raise RuntimeError("torch uses a different kernel on this device")


def _try_flash_package(device: str, dtype: torch.dtype) -> None:
    from flash_attn import flash_attn_func

    _attend(partial(flash_attn_func, causal=True), device, dtype, 1, 64, 4, 64)


def _attend(attend: Callable[..., Any], device: str, dtype: torch.dtype, *shape: int) -> Any:
    """Run attention; check that its gradients are finite, and return its output."""
    inputs = [_random(*shape, seed=seed).to(device, dtype).requires_grad_() for seed in range(3)]
    output = attend(*inputs)
    output.float().square().sum().backward()
    _check_finite(output, *(tensor.grad for tensor in inputs))
    return output


def working_collectives(device: str, *, notes: Notes) -> tuple[str, ...]:
    """Return the process-group backends for this device. gloo is tested, since the devices it declares are wrong."""
    distributed = torch.distributed
    if not distributed.is_available():
        notes.append("this torch build lacks torch.distributed")
        return ()
    others = [
        name
        for name, devices in distributed.Backend.backend_capability.items()
        if name not in ("gloo", "fake") and device in devices and distributed.is_backend_available(name)
    ]
    failing = f"gloo cannot move {device} tensors between processes"
    if distributed.is_gloo_available() and works(failing, notes, _try_gloo, device):
        others.append("gloo")
    return tuple(others)


def _try_gloo(device: str) -> None:
    """Run an all-reduce in a group of one process, without touching the default group."""
    gloo = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    group = gloo(torch.distributed.HashStore(), 0, 1, options)
    group.allreduce([torch.ones(2, device=device)]).wait()


def working_bits(quantizer: str, device: str, dtype: torch.dtype, *, notes: Notes) -> tuple[int, ...]:
    """Return the bit widths at which a quantized layer gives a correct output and gradient."""
    module = load_plugin(QUANT_PACKAGE, quantizer, kind="quantizer")
    if not works(f"{quantizer} does not import", notes, importlib.import_module, module.LIBRARY):
        return ()
    sizes = getattr(module, "GROUP_SIZES", ())
    group_size = _GROUP_SIZE if not sizes or _GROUP_SIZE in sizes else sizes[0]
    specs = [QuantSpec(quantizer=quantizer, bits=bits, group_size=group_size) for bits in sorted(module.BITS)]
    return tuple(
        spec.bits
        for spec in specs
        if works(f"{spec.bits}-bit {quantizer} does not run", notes, _try_quantized, spec, device, dtype)
    )


def _try_quantized(spec: QuantSpec, device: str, dtype: torch.dtype) -> None:
    weight = _random(_WIDTH, _WIDTH)
    inputs = _random(8, _WIDTH, seed=1).to(dtype)
    reference = inputs.double() @ weight.double().T
    inputs = inputs.to(device).requires_grad_()
    stored = quantize_weight(weight.to(device, dtype), spec, dtype)
    output = QuantLinear(stored, None)(inputs)
    output.float().square().sum().backward()
    _check_finite(output, inputs.grad)
    error = float((output.detach().cpu().double() - reference).norm() / reference.norm())
    if error > next(bound for bits, bound in _QUANTIZED_TOLERANCE.items() if bits <= spec.bits):
        raise ValueError(f"a small matmul is off by {error:.0%}")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _check_finite(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None or not bool(torch.isfinite(tensor).all()):
            raise ValueError("a result or its gradient is not finite")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of libraries. Logged errors are still shown."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
