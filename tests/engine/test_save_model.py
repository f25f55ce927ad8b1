"""Model folders of thousands of tensors: the work of saving them grows with their number, not with its square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from crosstune.models import weights
from crosstune.models.folder import weight_files
from crosstune.torch_engine.results import export


class CountedTensor(torch.Tensor):
    """A tensor that counts how often its size is asked for."""

    num_asked = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        CountedTensor.num_asked += 1
        return 4 * super().numel()

    def numel(self) -> int:
        CountedTensor.num_asked += 1
        return super().numel()

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> Any:
        return super().__torch_function__(*args, **options)


def save_torch(folder: Path, base: Path, num_tensors: int) -> int:
    """Save a model of so many tensors, and return how often the size of one was asked for."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(num_tensors):
            yield f"layers.{number}.weight", torch.full((2,), float(number)).as_subclass(CountedTensor)

    CountedTensor.num_asked = 0
    export.save_model(folder, AutoConfig.from_pretrained(base), tensors(), base=base)
    return CountedTensor.num_asked


def assert_linear(work: Callable[[int], int]) -> None:
    few, many = work(250), work(2000)
    assert few > 0 and many <= 9 * few, (few, many)


def test_torch_looks_at_each_tensor_a_few_times(tiny_model: Path, tmp_path: Path) -> None:
    assert_linear(lambda count: save_torch(tmp_path / str(count), tiny_model, count))


@pytest.mark.parametrize("engine", ["torch", "mlx"])
def test_shards_hold_every_tensor_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A shard is closed by the tensor that reaches its size."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 24)
    if engine == "torch":
        save_torch(tmp_path / "out", tiny_model, 7)
    else:
        mx = pytest.importorskip("mlx.core", reason="the mlx extra is not installed")
        from crosstune.mlx_engine import save_model

        arrays = {f"layers.{number}.weight": mx.full((2,), float(number)) for number in range(7)}
        save_model.save_arrays(tmp_path / "out", arrays, base=tiny_model)
    shards = [list(weights.read_header(path)[0]) for path in weight_files(tmp_path / "out")]
    assert [len(names) for names in shards] == [3, 3, 1]
    assert {name for names in shards for name in names} == {f"layers.{n}.weight" for n in range(7)}
