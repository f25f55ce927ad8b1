"""A run that moves between engines equals a run that stays: losses, archive, rejected moves."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same_gradients, chat

from crosstune.checkpoint.archive import unpack_archive
from crosstune.checkpoint.read import open_checkpoint
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.weights import read_arrays
from crosstune.runs.move import move
from crosstune.runs.pipeline import train
from crosstune.runs.restore import plain_moments

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [chat(f"{a} + {b}?", str(a + b)) for a in range(12) for b in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(model: Path, data: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    common = {"model_name": str(model), "dataset": str(data), "output_dir": str(tmp_path)}
    common |= {
        "precision": "fp32",
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "skip_eval": True,
        "lr": 1e-3,
    }
    return common | more


@pytest.fixture(scope="module")
def run(tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the CPU with checkpoints at steps 3 and 4; tests do not change it."""
    home = tmp_path_factory.mktemp("cpu")
    kept = Path(shutil.copy(data, home / "data.jsonl"))
    asked = options(tiny_model, kept, home, max_steps=4, save_steps=3, backend="cpu", name="run")
    return train(make_config(**asked)).folder


@pytest.fixture(scope="module")
def moved(run: Path) -> dict[str, Any]:
    """The report of its archive for MLX, after which its data is gone."""
    report = move(run, to="mlx", observer=Observers())
    (run.parent / "data.jsonl").rename(run.parent / "data.gone")
    return report


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_jsonl(folder / "metrics.jsonl")}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({"train_type": "lora"}, id="lora"),
        pytest.param({"train_type": "full", "lr": 1e-4}, id="full", marks=pytest.mark.slow),
        pytest.param(
            {"train_type": "dora", "packing": True, "context_length": 96},
            id="dora-packed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_there_and_back_again_is_the_straight_run(
    method: dict[str, Any], tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    asked = options(tiny_model, data, tmp_path, max_steps=12, save_steps=4, keep_last_n=5, **method)
    straight = train(make_config(**asked, backend="cpu", name="straight")).folder
    first = straight / "checkpoints" / "step-00000004"
    on_mlx = train(make_config(**asked, backend="mlx", name="mlx", resume=str(first))).folder
    second = on_mlx / "checkpoints" / "step-00000008"
    back = train(make_config(**asked, backend="cpu", name="back", resume=str(second))).folder
    expected, found = losses(straight), losses(back)
    assert list(found) == list(range(1, 13))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-4), step
    ended = open_checkpoint(back / "checkpoints" / "step-00000012")
    wanted = open_checkpoint(straight / "checkpoints" / "step-00000012").load()
    assert (ended.manifest.resumed_from or {})["backend"] == "mlx"
    for slot in ("first_moment", "second_moment"):
        assert_same_gradients(ended.load().moments[slot], wanted.moments[slot], bound=2e-2)


def test_an_archive_continues_in_another_place(moved: dict[str, Any], tmp_path: Path) -> None:
    assert moved["compared"]["difference"] < 1e-5
    assert (moved["machine"], moved["assumed_machine"]) == ("apple-m1-16gb", True)
    words = ["train", "--resume", moved["path"], "--backend", "mlx", "--max_steps", "6"]
    words += ["--output_dir", str(tmp_path)]
    assert main(words) == 0  # with the data of the archive
    assert sorted(losses(tmp_path / "run")) == list(range(1, 7))
    [event] = [row for row in read_jsonl(tmp_path / "run" / "events.jsonl") if row["kind"] == "moved"]
    assert (event["from"]["backend"], event["to"]["backend"]) == ("cpu", "mlx")
    assert event["difference"] < 1e-5
    assert main(words) == 0, "the same command again finds a finished run and unpacks nothing"


@pytest.mark.slow
def test_a_quantized_base_changes_its_bits_and_8_bit_moments_become_plain(
    tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    asked = options(tiny_model, data, tmp_path, max_steps=4, save_steps=4, backend="cpu", name="run")
    asked |= {"train_type": "qlora", "quantization_backend": "bnb", "optimizer": "adamw_8bit"}
    folder = train(make_config(**asked)).folder
    path = folder / "checkpoints" / "step-00000004"
    with pytest.raises(
        UserError, match="does not match the checkpoint"
    ) as error:  # nothing measured what it changes
        train(make_config(resume=str(path), name="moved", output_dir=str(tmp_path), backend="mlx"))
    assert "quantization" in error.value.why
    report = move(folder, to="mlx", observer=Observers(), out=tmp_path / "run.tar")
    assert report["compared"]["from"]["quantization"] == "bnb-4bit"
    assert report["compared"]["to"]["quantization"] == "mlx-4bit"
    moved = make_config(
        resume=str(tmp_path / "run.tar"), name="moved", output_dir=str(tmp_path), backend="mlx", max_steps=6
    )
    result = train(moved)
    assert result.summary["status"] == "finished"
    [event] = [row for row in read_jsonl(result.folder / "events.jsonl") if row["kind"] == "resumed"]
    assert {words.partition(":")[0] for words in event["adapted"]} == {"quantization", "optimizer"}
    end = open_checkpoint(result.folder / "checkpoints" / "step-00000006").load()
    assert all(float(step) == 6 for step in end.moments["step"].values())
    move(result.folder, to="cpu", observer=Observers(), out=tmp_path / "back.tar")
    back = f"train --resume {tmp_path / 'back.tar'} --output_dir {tmp_path / 'back'} --max_steps 7"
    assert main(back.split()) == 0
    assert read_json(tmp_path / "back" / "moved" / "plan.json")["options"]["optimizer"] == "adamw"


@pytest.mark.parametrize(("kind", "last"), [("AdamW8bit", "2"), ("Lion8bit", "1")])
def test_8_bit_moments_are_what_bitsandbytes_says_they_are(kind: str, last: str) -> None:
    import bitsandbytes.optim
    import torch
    from bitsandbytes.functional import dequantize_blockwise

    weight = torch.nn.Parameter(torch.randn(100, 77, generator=torch.Generator().manual_seed(0)))
    small = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = getattr(bitsandbytes.optim, kind)([weight, small], lr=1e-3)
    for _ in range(3):
        weight.grad, small.grad = torch.randn_like(weight), torch.randn_like(small)
        optimizer.step()
    states = {"w": optimizer.state[weight], "s": optimizer.state[small]}
    moments: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        for slot, value in state.items():
            moments.setdefault(slot, {})[name] = np.asarray(value)
    plain = plain_moments(moments, {"w": weight.detach().numpy(), "s": small.detach().numpy()})
    state = states["w"]
    expected = dequantize_blockwise(
        state[f"state{last}"], absmax=state[f"absmax{last}"], code=state[f"qmap{last}"], blocksize=256
    )
    slot = {"1": "first_moment", "2": "second_moment"}[last]
    np.testing.assert_array_equal(plain[slot]["w"], expected.numpy())
    assert ("second_moment" in plain) == ("step" in plain) == (last == "2")
    np.testing.assert_array_equal(plain["first_moment"]["s"], states["s"]["state1"].numpy())


def test_a_move_that_changes_the_loss_too_much_stops(
    moved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack_archive(Path(moved["path"]), tmp_path / "run")
    note = json.loads((tmp_path / "run" / "move.json").read_text())
    note["measured"]["loss"] *= 1.1
    (tmp_path / "run" / "move.json").write_text(json.dumps(note))
    words = ["train", "--resume", str(tmp_path / "run"), "--backend", "mlx", "--max_steps", "5"]
    assert main(words) == 2
    assert "The move changes the model too much" in capsys.readouterr().err
    assert main([*words, "--allow_mismatch", "loss"]) == 0


def test_adapters_on_the_last_layers_alone_move_too(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.json"
    few.write_text('{"num_layers": 1}')
    asked = options(tiny_model, data, tmp_path, max_steps=2, save_steps=2, mlx_config=str(few))
    folder = train(make_config(**asked, backend="mlx", name="run")).folder
    few.unlink()  # the run has a copy
    report = move(folder, to="cpu", observer=Observers(), out=tmp_path / "few.tar")
    assert report["compared"]["difference"] < 1e-5
    there = tmp_path / "there"
    words = ["--resume", str(tmp_path / "few.tar"), "--output_dir", str(there), "--max_steps", "4"]
    assert main(["train", *words]) == 0
    assert read_json(there / "run" / "plan.json")["backend"] == "cpu"  # where it was moved to
    names = read_arrays(there / "run" / "adapter" / "adapter_model.safetensors")
    assert names and all(".layers.1." in name for name in names)


def test_another_base_and_an_unknown_backend_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from crosstune.models.tiny import tiny_model as make

    assert main(["move", str(run), "--to", "mxl"]) == 2
    assert "mlx" in capsys.readouterr().err
    make(tmp_path / "other", seed=7)
    assert main(["move", str(run), "--to", "mlx", "--model_name", str(tmp_path / "other")]) == 2
    assert "is not the model that" in capsys.readouterr().err


def test_a_damaged_archive_is_refused_and_leaves_nothing(
    moved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path(moved["path"])
    raw, draw = whole.read_bytes(), np.random.default_rng(0)
    damaged = [raw[:size] for size in (100, 600, len(raw) // 3, len(raw) // 2, len(raw) - 20_000)]
    used = len(raw.rstrip(b"\0"))
    for place in draw.integers(0, used, 12):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << int(draw.integers(8))
        damaged.append(bytes(flipped))
    path, there = tmp_path / "damaged.tar", tmp_path / "there"
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            unpack_archive(path, there / "run")
        except UserError:
            refused += 1
            assert not list(there.glob("*"))
        else:  # a bit of the archive that carries nothing: a date, padding
            unpacked = sorted(p for p in (there / "run").rglob("*") if p.is_file())
            with tarfile.open(whole) as tar:
                assert [tar.extractfile(str(p.relative_to(there / "run"))).read() for p in unpacked] == [
                    p.read_bytes() for p in unpacked
                ]
            shutil.rmtree(there / "run")
    assert refused > 10
    path.write_bytes(damaged[0])
    assert main(["train", "--resume", str(path), "--output_dir", str(there)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_a_step_may_be_divided_differently_after_a_move(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another batch size with the same rows a step, near the end of the run, and in a run that was unpacked before."""
    archive = tmp_path / "run.tar"
    shutil.copy(data, run.parent / "data.jsonl")
    move(run / "checkpoints" / "step-00000004", to="mlx", observer=Observers(), out=archive)
    words = ["--resume", str(archive), "--output_dir", str(tmp_path / "there"), "--max_steps", "5"]
    words += ["--batch_size", "1", "--gradient_accumulation_steps", "4"]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["train", *words[:4], "--max_steps", "6"]) == 0
    assert "was already unpacked" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_not_called_damaged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    shutil.rmtree(folder / "checkpoints")
    assert main(["move", str(folder), "--to", "mlx"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
