"""Keys of configurations as torchtune and mlx-lm publish them, and the order of errors of the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from imported import AXOLOTL, MLX, TORCHTUNE, TUNE_CHATS, write

from crosstune.cli.main import main
from crosstune.importing.translate import import_file

TUNE_PAIRS = TORCHTUNE.replace("alpaca_dataset, packed: true", "stack_exchange_paired_dataset").replace(
    "torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss"
)


def test_columns_of_torchtune(tmp_path: Path) -> None:
    chats = import_file(write(tmp_path, "c.yaml", TUNE_CHATS))
    assert not chats.missing and chats.options["columns"] == "turns=messages"
    assert "backend" not in chats.options, "the best backend of this machine, also where it has no CUDA"
    pairs = import_file(write(tmp_path, "p.yaml", TUNE_PAIRS))
    assert not pairs.missing
    assert pairs.options["columns"] == "question=prompt,response_j=chosen,response_k=rejected"
    mapped = TUNE_CHATS.replace(
        "conversation_column: turns", "column_map: {input: asked, output: completion}"
    )
    assert import_file(write(tmp_path, "m.yaml", mapped)).options["columns"] == "asked=prompt"
    odd = TUNE_CHATS.replace("conversation_column: turns", "column_map: {image: picture}")
    assert [note.key for note in import_file(write(tmp_path, "o.yaml", odd)).missing] == [
        "dataset.column_map"
    ]


@pytest.mark.parametrize(("start", "is_kept"), [("1e-7", True), ("0", True), ("5e-5", False)])
def test_a_warm_up_of_mlx_lm_that_begins_near_0(start: str, is_kept: bool, tmp_path: Path) -> None:
    found = import_file(
        write(tmp_path, "m.yaml", MLX.replace("warmup: 10", f"warmup: 10, warmup_init: {start}"))
    )
    assert [note.key for note in found.missing] == ([] if is_kept else ["lr_schedule"])
    [note] = [note for note in found.notes if note.key == "lr_schedule"]
    assert ("begins at 0, not at 1e-07" in note.text) == (start == "1e-7")
    assert is_kept == ("warmup_steps" in found.options)


def test_an_error_in_the_input_is_said_before_the_default_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "crosstune.yaml", "mine: true\n")
    assert main(["import", str(tmp_path / "axolotl.yml")]) == 2
    assert f"{tmp_path / 'axolotl.yml'} cannot be read" in capsys.readouterr().err
    assert main(["import", str(write(tmp_path, "axolotl.yml", AXOLOTL))]) == 2
    assert "crosstune.yaml already exists" in capsys.readouterr().err
    assert (tmp_path / "crosstune.yaml").read_text() == "mine: true\n"
