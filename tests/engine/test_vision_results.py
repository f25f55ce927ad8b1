"""Results of training on pictures: folders that transformers opens with their image processor, and prompts of text."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from vision_models import FAMILIES, tiny_vision, write_rows

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.runs.pipeline import train

SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", [pytest.param(one, marks=[SLOW] * (one != "smolvlm")) for one in FAMILIES])
def test_a_merged_model_opens_with_its_processor(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_vision(tmp_path / "model", family)
    config = make_config(
        model_name=str(folder), dataset=str(write_rows(tmp_path)), output_dir=str(tmp_path), name="run", backend="cpu",
        precision="fp32", train_type="lora", max_steps=2, batch_size=2, lr=1e-2, skip_eval=True,
        train_vision_tower=True, train_projector=True,
    )  # fmt: skip
    run = train(config).folder
    assert main(["merge", str(run), "--backend", "cpu"]) == 0
    processors = [
        AutoImageProcessor.from_pretrained(place, backend="pil").to_dict()
        for place in (folder, run / "adapter", run / "merged")
    ]
    assert processors[0] == processors[1] == processors[2]
    before, after = (AutoModelForImageTextToText.from_pretrained(place) for place in (folder, run / "merged"))
    changed = {name for name, p in after.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    for part in ("vi", "layers"):  # the tower or the projector, and the language model
        assert any(part in name for name in changed)
    capsys.readouterr()
    asked = ["--prompt", "What colour is this?", "--max_new_tokens", "2", "--backend", "cpu"]
    assert main(["generate", str(run), *asked]) == 0


def test_a_moved_run_finds_its_pictures_where_they_were_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = tiny_vision(tmp_path / "model", "qwen2_5_vl"), write_rows(tmp_path)
    place = ["--model_name", str(folder), "--output_dir", str(tmp_path), "--name", "run", "--skip_eval"]
    amount = [
        "--max_steps",
        "2",
        "--lr",
        "1e-3",
        "--batch_size",
        "2",
        "--backend",
        "cpu",
        "--precision",
        "fp32",
    ]
    assert main(["train", *place, *amount, "--dataset", str(rows)]) == 0
    archive = tmp_path / "run.crosstune.tar"
    capsys.readouterr()
    assert main(["move", str(tmp_path / "run"), "--to", "cpu", "--out", str(archive)]) == 0
    assert "pictures" in "".join(capsys.readouterr())
    with tarfile.open(archive) as members:
        assert not any("rows.jsonl" in name for name in members.getnames())
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in (rows, *tmp_path.glob("*.png")):
        path.rename(copied / path.name)
    asked = [
        "train",
        "--resume",
        str(archive),
        "--output_dir",
        str(tmp_path / "there"),
        "--max_steps",
        "3",
        "--skip_eval",
    ]
    assert main([*asked, "--dataset", str(copied / rows.name)]) == 0
