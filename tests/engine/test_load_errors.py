"""Errors of the torch engine when transformers fails to build a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crosstune.core.errors import UserError
from crosstune.torch_engine.load import readable_errors


@pytest.mark.parametrize(
    "fault",
    [
        AttributeError,
        NameError,
        UnboundLocalError,
        ZeroDivisionError,
        OverflowError,
        IndexError,
        AssertionError,
        NotImplementedError,
    ],
)
def test_a_fault_of_the_library_names_the_folder(fault: type[Exception]) -> None:
    with (
        pytest.raises(UserError, match="cannot load the model in model") as found,
        readable_errors(Path("model")),
    ):
        raise fault("what it says")
    assert fault.__name__ in found.value.why


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("std::bad_alloc")]
)
def test_running_out_of_memory_is_not_a_fault_of_the_model(error: Exception) -> None:
    with pytest.raises(type(error)) as found, readable_errors(Path("model")):
        raise error
    assert found.value is error
