"""Triton kernels that write adapters to the left of e4m3 matrices, so that one fp8 matmul multiplies both.

Each number of an adapter is the sum of two e4m3 parts, together with the bits of bf16. Multiplying two such sums gives
three relevant terms: first x first, first x second, second x first. So one matrix gets the columns first, first, second,
the other first, second, first. The columns share the scales of the rows next to them; a power of two for each column
multiplies one side and divides the other, which keeps both in the range of e4m3.

Adapters come first in the sums, since tensor cores add e4m3 products in few bits: they cut off a small term at the end of a
sum.
"""

import triton
import triton.language as tl

NUM_FIELDS = tl.constexpr(9)
"""The fields of a side of a group: the address, line stride and column stride of its adapter, the number of lines, the address
of their scales, the address and line stride of the place for the parts, the number of columns, and the length of the sums."""


@triton.jit
def largest_of_columns(
    sides, tile_sides, tile_starts, largest,
    DTYPE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the largest absolute value of each column of an adapter, divided by the scales of its lines, into `largest`, as
    fp32 bits: positive numbers have the order of their bits."""
    side = tl.load(tile_sides + tl.program_id(0))
    values, _mask = _read_tile(sides, side, tl.load(tile_starts + tl.program_id(0)), DTYPE, LINES, COLUMNS)
    bits = tl.max(tl.abs(values), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + side * COLUMNS + tl.arange(0, COLUMNS), bits)


@triton.jit
def write_parts(
    sides, tile_sides, tile_starts, largest, factors,
    DTYPE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the parts of an adapter to the left of a frozen matrix, and the factor of each column for the other side."""
    side = tl.load(tile_sides + tl.program_id(0))
    start = tl.load(tile_starts + tl.program_id(0))
    values, mask = _read_tile(sides, side, start, DTYPE, LINES, COLUMNS)
    fields = sides + side * NUM_FIELDS
    column = tl.arange(0, COLUMNS)
    own = tl.load(largest + side * COLUMNS + column).to(tl.float32, bitcast=True)
    other = tl.load(largest + (side ^ 1) * COLUMNS + column).to(tl.float32, bitcast=True)
    # The other side multiplies numbers of about this size; both sides meet in the middle, if this one fits.
    usual = 10.0 * other * tl.sqrt(tl.load(fields + 8).to(tl.float32))
    smallest = tl.exp2(tl.ceil(tl.log2(own / 448.0)))
    middle = tl.where(usual > 0, tl.exp2(tl.floor(0.5 * tl.log2(own / usual) + 0.5)), 0.0)
    # Within 2^-64 and 2^64, so that nothing is divided by zero; a column of zeros must not set the scale of a row.
    middle = tl.minimum(tl.maximum(middle, 5.421010862427522e-20), 1.8446744073709552e19)
    factor = tl.where(own > 0, tl.maximum(smallest, middle), 5.421010862427522e-20)
    if start == 0:
        tl.store(factors + side * COLUMNS + column, factor)
    first, second = _split(values / factor[None, :])
    count = tl.load(fields + 7)
    line = (start + tl.arange(0, LINES)).to(tl.int64)[:, None]
    place = (
        tl.load(fields + 5).to(tl.pointer_type(tl.float8e4nv)) + line * tl.load(fields + 6) + column[None, :]
    )
    tl.store(place, first, mask=mask)
    tl.store(place + count, second, mask=mask)
    tl.store(place + 2 * count, first, mask=mask)


@triton.jit
def prepend_low(
    low, factors, values, columns, packed, scale, low_stride, values_stride, packed_stride, count, room,
    N: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Write the parts of a row of `low` to the left of its e4m3 row, and zeros into the rest of the room (at most SPARE).
    Rescale the row if they exceed its range."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < count
    found = tl.load(low + row * low_stride + column, mask=mask, other=0.0).to(tl.float32)
    found *= tl.load(factors + column, mask=mask, other=0.0)
    factor = tl.load(scale + row)
    largest = tl.max(tl.abs(found))
    if largest > 448.0 * factor:
        factor = largest / 448.0
        tl.store(scale + row, factor)
        for start in range(0, N, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < N
            part = tl.load(values + row * values_stride + place, mask=inside, other=0.0).to(tl.float32)
            if SCALED:
                part *= tl.load(columns + place, mask=inside, other=0.0)
            tl.store(
                packed + row * packed_stride + room + place, (part / factor).to(tl.float8e4nv), mask=inside
            )
    first, second = _split(found / factor)
    target = packed + row * packed_stride + column
    tl.store(target, first, mask=mask)
    tl.store(target + count, first, mask=mask)
    tl.store(target + 2 * count, second, mask=mask)
    rest = 3 * count + tl.arange(0, SPARE)
    zeros = tl.zeros([SPARE], dtype=tl.float32).to(tl.float8e4nv)
    tl.store(packed + row * packed_stride + rest, zeros, mask=rest < room)


@triton.jit
def _read_tile(sides, side, start, DTYPE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile of an adapter, divided by the scales of its lines, and its mask."""
    fields = sides + side * NUM_FIELDS
    line = (start + tl.arange(0, LINES)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (line < tl.load(fields + 3)) & (column < tl.load(fields + 7))
    place = line * tl.load(fields + 1) + column * tl.load(fields + 2)
    values = tl.load(tl.load(fields).to(tl.pointer_type(DTYPE)) + place, mask=mask, other=0.0)
    scales = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + line, mask=line < tl.load(fields + 3), other=1.0)
    return values.to(tl.float32) / scale, mask


@triton.jit
def _split(values):
    """Return two e4m3 numbers with the nearest sum."""
    first = values.to(tl.float8e4nv)
    return first, (values - first.to(tl.float32)).to(tl.float8e4nv)
