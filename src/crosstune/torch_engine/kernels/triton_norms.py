"""Triton kernels of the fast layers: RMSNorm, rows in e4m3, and cross entropy. A program handles one row."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, added, total, out, rstd, weight, packed, scale, out_stride, packed_stride, eps, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    values = tl.load(x + row * N + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added + row * N + column, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * N + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values) / N + eps)
    tl.store(rstd + row, inverse)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    normal = values * inverse * gain
    tl.store(out + row * out_stride + column, normal.to(out.dtype.element_ty), mask=mask)
    if QUANTIZE:
        normal = tl.where(mask, normal, 0.0)
        factor = tl.maximum(tl.max(tl.abs(normal)), 1e-12) / 448.0
        tl.store(scale + row, factor)
        tl.store(packed + row * packed_stride + column, (normal / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def rebuild_rms_norm(total, rstd, weight, out, out_stride, offset, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    values = tl.load(total + row * N + column, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    normal = values * tl.load(rstd + row) * gain
    tl.store(out + row * out_stride + column, normal.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(
    gradient, total, rstd, weight, residual, out, gradient_stride, residual_stride, out_stride, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    inverse = tl.load(rstd + row)
    values = tl.load(total + row * N + column, mask=mask, other=0.0).to(tl.float32) * inverse
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    weighted = tl.load(gradient + row * gradient_stride + column, mask=mask, other=0.0).to(tl.float32) * gain
    found = (weighted - values * (tl.sum(weighted * values) / N)) * inverse
    if ADD:
        found += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows(
    values, columns, packed, scale, stride, packed_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        part = tl.load(values + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            part *= tl.load(columns + column, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.abs(part))
    factor = tl.maximum(tl.max(largest), 1e-12) / 448.0
    tl.store(scale + row, factor)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        part = tl.load(values + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            part *= tl.load(columns + column, mask=mask, other=0.0)
        tl.store(packed + row * packed_stride + column, (part / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def cross_entropy(logits, targets, losses, N, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    """Write the loss of each row; put the gradient of its logits in their place."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * N
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(base + column, mask=column < N, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        # A lane that has seen no value yet has -inf twice, whose difference is not a number.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.exp(values - shift)
        largest = higher
    top = tl.max(largest)
    sum_all = tl.sum(total * tl.exp(largest - top))
    log_sum = top + tl.log(sum_all)
    target = tl.load(targets + row)
    tl.store(losses + row, log_sum - tl.load(base + target).to(tl.float32))
    if GRADIENT:
        tl.debug_barrier()
        for start in range(0, N, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < N
            values = tl.load(base + column, mask=mask, other=float("-inf")).to(tl.float32)
            found = tl.exp(values - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(base + column, found.to(logits.dtype.element_ty), mask=mask)
