"""The sizes that round alike are found by trial: for libraries that add in another order at some sizes, and for this one."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="needs the extra crosstune[torch]")
from torch.nn import functional  # noqa: E402

from crosstune.torch_engine import steady_attention, steady_products  # noqa: E402
from crosstune.torch_engine.steady_attention import BLOCK, find_alike_widths, width_of  # noqa: E402
from crosstune.torch_engine.steady_products import ON_CPU, AlikeSizes, product  # noqa: E402
from crosstune.torch_engine.steady_rounding import SteadyRounding  # noqa: E402

INPUTS, OUTPUTS = 96, 24
attend = functional.scaled_dot_product_attention


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = draw(INPUTS, OUTPUTS)


class Library:
    """Products that are added in two halves for some numbers of rows, and in the last row of others."""

    def __init__(self, *, halves: range | tuple[int, ...] = (), last: tuple[int, ...] = ()) -> None:
        self.halves, self.last, self.asked = halves, last, []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(rows))
        found = torch.stack([self.add(row, len(rows) in self.halves) for row in rows[:1]])
        found = found.expand(len(rows), -1).clone()
        if len(rows) in self.last:
            found[-1] = self.add(rows[-1], True)
        return found

    def add(self, row: torch.Tensor, halves: bool) -> torch.Tensor:
        if not halves:
            return row @ WEIGHT
        half = INPUTS // 2
        return row[:half] @ WEIGHT[:half] + row[half:] @ WEIGHT[half:]


def sizes(library: Library) -> AlikeSizes:
    return AlikeSizes.first(library, inputs=INPUTS, outputs=OUTPUTS, device=torch.device("cpu"))


def test_a_product_is_whole_where_its_size_rounds_alike() -> None:
    library = Library(halves=(8, *range(57, 193)), last=(272,))
    found = sizes(library)
    assert found.reference == 32
    wanted = {
        1: [16],
        9: [16],
        17: [24],
        40: [40],
        50: [56],
        264: [264],
        600: [600],
        60: [32, 32],
        100: [56, 48],
    }
    wanted |= {ON_CPU.most + 40: [ON_CPU.most, 40]}
    assert {count: found.cover(count, library) for count in wanted} == wanted
    for count, cover in found.covers.items():
        assert sum(cover[:-1]) < count <= sum(cover), "only the last part is filled up"
        assert not set(cover) & {8, 272, *range(57, 193)}


def test_the_sizes_do_not_depend_on_the_order_of_calls() -> None:
    counts = list(range(1, 1300, 37))
    orders = [counts, counts[::-1], random.Random(0).sample(counts, len(counts))]
    library = Library(halves=range(57, 400), last=(8, 48, 640))
    covers = []
    for order in orders:
        found = sizes(library)
        covers.append({count: found.cover(count, library) for count in order})
    assert covers[0] == covers[1] == covers[2]


def test_one_size_where_all_round_differently() -> None:
    class Each(Library):
        def add(self, row: torch.Tensor, halves: bool) -> torch.Tensor:
            return row @ WEIGHT * self.asked[-1]

    library = Each()
    found = sizes(library)
    assert found.reference == ON_CPU.fixed
    assert found.cover(100, library) == [128] and found.cover(300, library) == [128, 128, 128]


def test_each_size_is_tried_once() -> None:
    library = Library()
    found = sizes(library)
    found.cover(260, library)
    asked = len(library.asked)
    for count in (257, 258, 264, 260):
        found.cover(count, library)
    assert len(library.asked) == asked


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs, outputs", [(1536, 576), (1536, 16), (576, 1), (8, 300)])
def test_rows_in_any_number_on_this_machine(inputs: int, outputs: int, threads: int) -> None:
    before = torch.get_num_threads()
    rows, columns = draw(1100, inputs), draw(outputs, inputs).t()
    torch.set_num_threads(threads)
    try:
        whole = product(rows, columns, None)
        for count in (1, 7, 16, 23, 56, 60, 100, 193, 260, 381, 600):
            assert torch.equal(product(rows[-count:], columns, None), whole[-count:]), count
    finally:
        torch.set_num_threads(before)


def test_weights_of_zeros_say_nothing_about_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_products, "_TRIED", {})
    rows = draw(9, 64)
    assert not product(rows, torch.zeros(64, 32), None).any() and not steady_products._TRIED
    product(rows, draw(64, 32), None)
    assert len(steady_products._TRIED) == 1
    assert product(rows[:0], draw(64, 32), None).shape == (0, 32)


def test_widths_of_attention_are_those_that_round_alike() -> None:
    def halved(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor
    ) -> torch.Tensor:
        """Add in two halves for widths of 272 to 496 keys, as a library may."""
        rest, far = key.shape[2] % BLOCK, torch.float32
        wide = torch.softmax(query.double() @ key.double().transpose(2, 3) + attn_mask, dim=-1)
        exact = wide @ value.double()
        return exact.to(far) * (1 + 1e-6 * (272 <= rest < 500))

    found = find_alike_widths(halved, 16)
    assert found == (*range(16, 257, 16), 496 + 16)
    assert [width_of(count, found) for count in (1, 16, 17, 256, 257, 512, 513, 800)] == [
        *(16, 16, 32, 256, 512, 512, 528, 1024)
    ]
    assert find_alike_widths(lambda query, *_, **__: torch.rand(query.shape), 16) == ()


def test_prompts_beside_each_other_after_a_prefix_see_the_same_numbers() -> None:
    if not steady_attention.alike_widths(32, torch.get_num_threads()):
        pytest.skip("no numbers of keys round alike on this machine")
    shared, lengths = 300, [40, 3, 17]
    width = max(lengths)
    query, key, value = (draw(3, 4, shared + width, 32 + n)[..., :32] for n in range(3))
    mask = torch.zeros(3, 1, width, shared + width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :, :, :shared] = True
        mask[row, 0, -length:, -length:] = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.inference_mode(), SteadyRounding():
        together = attend(query[:, :, shared:], key, value, mask)
        for row, length in enumerate(lengths):
            places = [*range(shared), *range(shared + width - length, shared + width)]
            alone = attend(
                *(tensor[row : row + 1, :, places] for tensor in (query, key, value)), is_causal=True
            )
            assert torch.equal(together[row, :, -length:], alone[0, :, -length:])
        nothing = attend(query[:, :, shared:], key, value, torch.zeros_like(mask))
        grouped = attend(query, key[:, :2], value[:, :2], is_causal=True, enable_gqa=True)
        repeated = attend(
            query, *(tensor[:, :2].repeat_interleave(2, dim=1) for tensor in (key, value)), is_causal=True
        )
    assert not nothing.any() and torch.equal(grouped, repeated)


def test_a_weight_of_few_numbers_does_not_decide_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are exact in any order, so that all numbers of rows seem to round alike."""
    monkeypatch.setattr(steady_products, "_TRIED", {})
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, generator=generator) for size in ((1024, 576), (576, 576)))
    diagonal = torch.eye(576)
    assert torch.equal(product(rows, diagonal.t(), None), rows) and not steady_products._TRIED
    whole = product(rows, weight.t(), None)
    assert all(torch.equal(product(rows[:count], weight.t(), None), whole[:count]) for count in (3, 8, 100))
