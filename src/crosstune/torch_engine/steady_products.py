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

WIDE = 16384
SAMPLES = 64
"""Sums that are compared for each place among the rows: in some of them, another order of additions gives the same bits."""
ALIGNMENT_BYTES = 64

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which numbers of rows are tried."""

    step: int
    """All are multiples of this: few numbers to try, and little padding."""
    most: int
    first: tuple[int, ...]
    """The reference is one of these, tried before all others."""
    fixed: int
    """The only one where all of these differ."""


ON_CPU = Choice(step=8, most=1024, first=(32, 64, 128, 256, 512), fixed=128)
ON_GPU = Choice(step=512, most=16384, first=(512, 1024, 2048, 4096, 8192), fixed=1024)
"""Few rows do not keep a GPU busy."""
WIDE_ON_CPU = Choice(step=8, most=1024, first=(16, 32, 64), fixed=64)
WIDE_ON_GPU = Choice(step=64, most=1024, first=(64, 128, 256), fixed=64)
"""For a head: few tokens reach it, and its output is wide."""


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
    shape = (inputs, outputs, *columns.stride(), columns.data_ptr() % ALIGNMENT_BYTES)
    of = (str(columns.device), *shape, bias is not None, torch.get_num_threads())
    if of not in _TRIED and 2 * (used := int(columns.count_nonzero())) < columns.numel():
        # Sums of mostly zeros hide their order. All zeros, an adapter before training, have none.
        fixed = _CHOICES[columns.device.type == "cpu", outputs > WIDE].fixed if used else count
        return [fixed] * math.ceil(count / fixed)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return _multiply(rows, columns, bias)

    if of not in _TRIED:
        _TRIED[of] = AlikeSizes.first(multiply, inputs=inputs, outputs=outputs, device=columns.device)
    return _TRIED[of].cover(count, multiply)


@dataclass
class AlikeSizes:
    """The numbers of rows that a weight of one shape is multiplied with alike.

    A size is tried when it is first needed: are all rows of the product of one repeated row the same bits, and those of the
    reference? The answer depends on the machine, the threads and the shape alone, hence not on the order of calls.
    """

    inputs: int
    outputs: int
    device: torch.device
    choice: Choice
    reference: int
    known: dict[int, bool]
    covers: dict[int, list[int]]

    @classmethod
    def first(cls, multiply: Multiply, *, inputs: int, outputs: int, device: torch.device) -> AlikeSizes:
        """Take as the reference the smallest size of the largest group that rounds alike, or one in the middle if all differ."""
        choice = _CHOICES[device.type == "cpu", outputs > WIDE]
        groups: list[tuple[torch.Tensor, list[int]]] = []
        for size in choice.first:
            found = row_in_all_places(multiply, size, inputs=inputs, outputs=outputs, device=device)
            if found is None:
                continue
            for other, sizes in groups:
                if torch.equal(other, found):
                    sizes.append(size)
                    break
            else:
                groups.append((found, [size]))
        largest = max((sizes for _, sizes in groups), key=len, default=[])
        reference = largest[0] if len(largest) > 1 else choice.fixed
        return cls(
            inputs=inputs,
            outputs=outputs,
            device=device,
            choice=choice,
            reference=reference,
            known={reference: True},
            covers={},
        )

    def is_alike(self, size: int, multiply: Multiply) -> bool:
        if size not in self.known:
            found, wanted = (
                row_in_all_places(
                    multiply, rows, inputs=self.inputs, outputs=self.outputs, device=self.device
                )
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
        step, most = self.choice.step, self.choice.most
        if count > most:
            return self.cover(most, multiply) + self.cover(count - most, multiply)
        filled = math.ceil(count / step) * step
        for size in range(filled, max(filled, self.reference) + 1, step):
            if self.is_alike(size, multiply):
                return [size]
        first = self.cover(max(self.reference, math.ceil(filled / 2 / step) * step), multiply)
        rest = count - sum(first)
        return first + self.cover(rest, multiply) if rest > 0 else first


def row_in_all_places(
    multiply: Multiply, size: int, *, inputs: int, outputs: int, device: torch.device
) -> torch.Tensor | None:
    """Return the product of some rows, each repeated so many times; None if it depends on the place among them."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for row in torch.randn(math.ceil(SAMPLES / outputs), inputs, generator=generator).to(device):
        products = multiply(row.repeat(size, 1))
        if not bool((products == products[0]).all()):
            return None
        found.append(products[0].clone())
    return torch.cat(found)


_CHOICES = {
    (True, False): ON_CPU,
    (True, True): WIDE_ON_CPU,
    (False, False): ON_GPU,
    (False, True): WIDE_ON_GPU,
}
"""By whether it is a CPU, and whether the output is wide."""
_TRIED: dict[tuple[int | bool | str, ...], AlikeSizes] = {}
