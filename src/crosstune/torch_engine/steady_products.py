"""Multiply rows with a weight in fp32 so that a row's product does not depend on the number of rows beside it.

A library chooses the order of additions by the number of rows, and many numbers of rows share one order. Which ones do is
tried once for each shape of a weight, so that most products are computed whole, with a few rows of padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

STEP = 8
"""Rows of a product on a CPU are a multiple of this: few numbers to try, and little padding."""
MOST_ROWS = 1024
"""Rows of the largest product on a CPU, and of each product on another device, where no sizes are tried."""
FIRST_SIZES, FIXED_SIZE = (32, 64, 128, 256, 512), 128
FIRST_WIDE_SIZES, FIXED_WIDE_SIZE = (16, 32, 64), 64
"""For a head: few tokens reach it, and its output is wide."""
WIDE = 16384
SAMPLES = 64
"""Sums that are compared for each place among the rows: in some of them, another order of additions gives the same bits."""
ALIGNMENT_BYTES = 64

Multiply = Callable[[torch.Tensor], torch.Tensor]


def product(rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows in parts whose sizes round alike, the last part filled up with zeros."""
    if not len(rows):
        return _multiply(rows, columns, bias)
    rows = rows.contiguous()
    if rows.data_ptr() % ALIGNMENT_BYTES:
        rows = rows.clone()
    sizes = _sizes(len(rows), columns, bias)
    total = sum(sizes)
    last = F.pad(rows[total - sizes[-1] :], (0, 0, 0, total - len(rows))) if total > len(rows) else None
    if len(sizes) == 1:
        return _multiply(rows if last is None else last, columns, bias)[: len(rows)]
    # Written in place: joining the parts would cost as much as a product.
    found, start = rows.new_empty(total, columns.shape[1]), 0
    for size in sizes:
        stop = start + size
        part = rows[start:stop] if last is None or stop < total else last
        _multiply(part, columns, bias, out=found[start:stop])
        start = stop
    return found[: len(rows)]


def _multiply(
    rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.mm(rows, columns, out=out) if bias is None else torch.addmm(bias, rows, columns, out=out)


def _sizes(count: int, columns: torch.Tensor, bias: torch.Tensor | None) -> Sequence[int]:
    """Return the numbers of rows to multiply at a time."""
    inputs, outputs = columns.shape
    if columns.device.type != "cpu":
        size = FIXED_WIDE_SIZE if outputs > WIDE else MOST_ROWS
        return [size] * math.ceil(count / size)
    shape = (inputs, outputs, *columns.stride(), columns.data_ptr() % ALIGNMENT_BYTES)
    of = (*shape, bias is not None, torch.get_num_threads())
    if of not in _TRIED and not columns.any():  # an adapter before training: zeros, in any order of additions
        return [count]

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return _multiply(rows, columns, bias)

    if of not in _TRIED:
        _TRIED[of] = AlikeSizes.first(multiply, inputs=inputs, outputs=outputs)
    return _TRIED[of].cover(count, multiply)


@dataclass
class AlikeSizes:
    """The numbers of rows that a weight of one shape is multiplied with alike.

    A size is tried when it is first needed: are all rows of the product of one repeated row the same bits, and those of the
    reference? The answer depends on the machine, the threads and the shape alone, hence not on the order of calls.
    """

    inputs: int
    outputs: int
    reference: int
    known: dict[int, bool]
    covers: dict[int, list[int]]

    @classmethod
    def first(cls, multiply: Multiply, *, inputs: int, outputs: int) -> AlikeSizes:
        """Take as the reference the smallest size of the largest group that rounds alike, or one in the middle if all differ."""
        is_wide = outputs > WIDE
        groups: list[tuple[torch.Tensor, list[int]]] = []
        for size in FIRST_WIDE_SIZES if is_wide else FIRST_SIZES:
            found = row_in_all_places(multiply, size, inputs=inputs, outputs=outputs)
            if found is None:
                continue
            for other, sizes in groups:
                if torch.equal(other, found):
                    sizes.append(size)
                    break
            else:
                groups.append((found, [size]))
        largest = max((sizes for _, sizes in groups), key=len, default=[])
        reference = largest[0] if len(largest) > 1 else FIXED_WIDE_SIZE if is_wide else FIXED_SIZE
        return cls(inputs=inputs, outputs=outputs, reference=reference, known={reference: True}, covers={})

    def is_alike(self, size: int, multiply: Multiply) -> bool:
        if size not in self.known:
            found, wanted = (
                row_in_all_places(multiply, rows, inputs=self.inputs, outputs=self.outputs)
                for rows in (size, self.reference)
            )
            self.known[size] = found is not None and wanted is not None and torch.equal(found, wanted)
        return self.known[size]

    def cover(self, count: int, multiply: Multiply) -> list[int]:
        """Return sizes that round alike for so many rows: one where it can be, or else those of two parts."""
        if count not in self.covers:
            self.covers[count] = self._cover(count, multiply)
        return self.covers[count]

    def _cover(self, count: int, multiply: Multiply) -> list[int]:
        if count > MOST_ROWS:
            return self.cover(MOST_ROWS, multiply) + self.cover(count - MOST_ROWS, multiply)
        filled = math.ceil(count / STEP) * STEP
        for size in range(filled, max(filled, self.reference) + 1, STEP):
            if self.is_alike(size, multiply):
                return [size]
        first = self.cover(max(self.reference, math.ceil(filled / 2 / STEP) * STEP), multiply)
        rest = count - sum(first)
        return first + self.cover(rest, multiply) if rest > 0 else first


def row_in_all_places(multiply: Multiply, size: int, *, inputs: int, outputs: int) -> torch.Tensor | None:
    """Return the product of some rows, each repeated so many times; None if it depends on the place among them."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for row in torch.randn(math.ceil(SAMPLES / outputs), inputs, generator=generator):
        products = multiply(row.repeat(size, 1))
        if not bool((products == products[0]).all()):
            return None
        found.append(products[0].clone())
    return torch.cat(found)


_TRIED: dict[tuple[int | bool, ...], AlikeSizes] = {}
