"""A reader written from docs/reference/checkpoint-format.md alone finds in a real run what crosstune finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from independent_reader import read_checkpoint

from crosstune.checkpoint.manifest import WEIGHTS
from crosstune.checkpoint.read import open_checkpoint
from crosstune.config.load import make_config
from crosstune.runs.pipeline import train


def test_an_independent_reader_reads_a_real_run(tmp_path: Path, tiny_model: Path, write_jsonl: Any) -> None:
    row = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]}
    options = {"backend": "cpu", "precision": "fp32", "max_steps": 2, "save_steps": 2, "skip_eval": True}
    options |= {"model_name": str(tiny_model), "dataset": str(write_jsonl([row] * 20)), "save_model": False}
    result = train(make_config(**options, output_dir=str(tmp_path), name="run"))
    folder = result.folder / "checkpoints" / "latest"
    theirs, ours = read_checkpoint(folder), open_checkpoint(folder)
    state = ours.load()
    assert theirs["manifest"] == ours.manifest.to_json()
    assert set(theirs["moments"]) == {"first_moment", "second_moment", "step"}
    for name, array in state.weights.items():
        np.testing.assert_array_equal(theirs["weights"][name], array)
        np.testing.assert_array_equal(
            theirs["moments"]["second_moment"][name], state.moments["second_moment"][name]
        )
    np.testing.assert_array_equal(theirs["random"]["torch.cpu"], state.random["torch.cpu"])
    assert theirs["manifest"]["data"]["epoch"] == 0
    assert len(Path(__file__).with_name("independent_reader.py").read_text().splitlines()) <= 50
    weights = folder.resolve() / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="was changed"):
        read_checkpoint(folder)
