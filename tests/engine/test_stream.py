"""Torch finds weights through the common check of safetensors headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.files.safetensors_header import BadSafetensors
from crosstune.torch_engine.loading.stream import find_tensors


def write(folder: Path, **tensors: Any) -> None:
    raw = json.dumps({name: {"data_offsets": [0, 8]} | entry for name, entry in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))


def test_a_bad_header_and_a_dtype_that_torch_has_not_are_refused(tmp_path: Path) -> None:
    good = {"dtype": "F32", "shape": [2]}
    write(tmp_path, a=good)
    assert list(find_tensors(tmp_path)) == ["a"]
    write(tmp_path, a=good, b=good)
    with pytest.raises(BadSafetensors, match="invalid offset"):
        find_tensors(tmp_path)
    write(tmp_path, a={"dtype": "C64", "shape": [1]})
    with pytest.raises(UserError, match="C64"):
        find_tensors(tmp_path)
