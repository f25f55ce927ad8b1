"""Latent diffusion on the common loop: a resumed run equals the uninterrupted run; trained folders can be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
from crosstune.recipes.latent_diffusion.texts import WriteOptions
from crosstune.runs.pipeline import train

SHAPE = {"hidden_size": 32, "n_blocks": 2, "batch_size": 8, "backend": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs, and a run of eight steps in every mode with dropout and an average of its weights."""
    home = tmp_path_factory.mktemp("latents")
    build(
        BuildRequest(source="grammar", out=home / "pairs", max_texts=200, options=WriteOptions(max_tokens=12))
    )
    train_to(home, "whole", 8)
    return home


def train_to(home: Path, name: str, steps: int, **options: Any) -> Path:
    given = {
        "recipe": "latent_diffusion",
        "dataset": str(home / "pairs"),
        "output_dir": str(home / "runs"),
        "name": name,
        "max_steps": steps,
        "save_steps": 3,
        "warmup_steps": 0,
        "lr_scheduler": "constant",
        "loss_type": "random",
        "dropout": 0.2,
        "ema_decay": 0.8,
        "eval_steps": 4,
        "eval_samples": 8,
        "decode_steps": 2,
        **SHAPE,
    }
    return train(make_config(**given | options)).folder


def losses(folder: Path) -> list[tuple[float, float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row["nats_per_token"]) for row in rows]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(home: Path) -> None:
    whole = home / "runs" / "whole"
    part = train_to(home, "part", 5, skip_eval=True)
    shutil.rmtree(part / "checkpoints" / "step-00000005")  # continue from step 3
    train_to(home, "part", 8, resume="auto", skip_eval=True)
    assert len(losses(whole)) == 8 and losses(part) == losses(whole)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (part, whole)]
    assert weights[0] == weights[1]


def test_the_result_is_the_average(home: Path) -> None:
    """Not the last weights, which the checkpoint has besides."""
    from safetensors.numpy import load_file

    from crosstune.checkpoint.read import open_checkpoint

    run = home / "runs" / "whole"
    state = open_checkpoint(run / "checkpoints" / "step-00000008").load()
    model = load_file(run / "model" / "model.safetensors")
    for name, average in state.moments["average"].items():
        np.testing.assert_array_equal(model[name], average)
    assert any((model[name] != weight).any() for name, weight in state.weights.items())


def test_another_shape_does_not_continue(home: Path) -> None:
    with pytest.raises(UserError):
        train_to(home, "whole", 10, resume="auto", hidden_size=64)


def latents(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["latents", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_a_run_decodes_encodes_and_is_evaluated(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, vectors = str(home / "runs" / "whole"), home / "vectors.npy"
    text = "the tiny cat sees a red ball"
    encoded = json.loads(latents(capsys, "encode", run, "--text", text, "--out", str(vectors), "--json"))
    np.testing.assert_allclose(np.load(vectors), encoded["vectors"], atol=1e-6)
    one = json.loads(latents(capsys, "decode", run, "--vectors", str(vectors), "--json"))
    assert len(one["texts"]) == 1 and one["notes"] == []
    np.save(vectors, 3 * np.load(vectors))
    scaled = json.loads(latents(capsys, "decode", run, "--vectors", str(vectors), "--json"))
    assert scaled["texts"] == one["texts"] and "1 vectors did not have norm 1" in scaled["notes"][0]
    corrected = json.loads(latents(capsys, "decode", run, "--text", text, "--correct", "2", "--json"))
    single = json.loads(latents(capsys, "decode", run, "--text", text, "--json"))
    assert corrected["texts"][0]["cosine"] >= single["texts"][0]["cosine"]
    assert main(["latents", "decode", run, "--text", text, "--live", "--steps", "3"]) == 0
    assert "step   3/3" in capsys.readouterr().err
    made = json.loads(
        latents(capsys, "sample", run, "--samples", "3", "--out", str(vectors), "--overwrite", "--json")
    )
    assert len(made["texts"]) == 3 and {"text", "cosine"} == made["texts"][0].keys()
    np.testing.assert_allclose(np.linalg.norm(np.load(vectors), axis=1), 1.0, atol=1e-5)
    assert main(["latents", "sample", run, "--samples", "2", "--live", "--steps", "4"]) == 0
    captured = capsys.readouterr()
    assert "step   4/4" in captured.err and len(captured.out.splitlines()) == 2
    pytest.importorskip("sacrebleu", reason="the extra `latents` is not installed")
    words = f"eval {run} --data {home}/pairs --samples 5 --correct 1 --json"
    found = json.loads(latents(capsys, *words.split()))
    wanted = "single_pass shuffled corrected encode sampled token_accuracy_zero nats_per_token"
    assert set(wanted.split()) <= found.keys()
    assert found["corrected"]["cosine"] >= found["single_pass"]["cosine"] and found["samples"] == 5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a: a[:, :-1], "the model reads 96 dimensions"),
        (lambda a: a * np.nan, "the norm of vector 0 is nan"),
        (lambda a: a * 0, "the norm of vector 0 is 0"),
    ],
)
def test_vectors_that_cannot_be_decoded(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, why: str
) -> None:
    np.save(tmp_path / "v.npy", change(np.asarray(open_pairs(home / "pairs").splits["train"].latents[:2])))
    run = str(home / "runs" / "whole")
    assert why in latents(capsys, "decode", run, "--vectors", str(tmp_path / "v.npy"), code=2)


def test_pairs_of_another_encoder_are_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "pairs"
    shutil.copytree(home / "pairs", other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["encoder"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert "were not made by the model's encoder" in latents(
        capsys, "eval", str(home / "runs" / "whole"), "--data", str(other), code=2
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["decode", "RUN"], "either --vectors or --text"),
        (["decode", "PAIRS", "--text", "a"], "contains no trained latent-diffusion model"),
        (["encode", "RUN", "--text", " ".join(["cat"] * 13)], "the model reads 1 to 12"),
        (["encode", "RUN", "--text", "the cat", "--out", "RUN"], "it is a folder"),
        (["decode", "RUN", "--text", "a", "--crops", "2"], "decode does not accept it"),
        (["decode", "RUN", "--text", "a", "--device", "cuda:99"], "There is no device 'cuda:99'"),
        (["sample", "NOWHERE"], "There is no run NOWHERE"),
        (["build", "grammar", "--out", "OUT", "--crops", "2"], "a span of a text needs a vector of its own"),
        (["build", "nowhere.txt", "--out", "OUT"], "nowhere.txt"),
        (["build", "grammar", "--out", "OUT", "--validation_share", "1"], "--validation_share"),
        (["export", "RUN", "--out", "OUT"], "is not a folder of (text, vector) pairs"),
    ],
)
def test_requests_that_are_wrong(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    places = {"RUN": str(home / "runs" / "whole"), "PAIRS": str(home / "pairs"), "OUT": str(tmp_path / "out")}
    assert why in latents(capsys, *(places.get(word, word) for word in words), code=2)


def test_a_model_of_one_direction_refuses_the_other(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_to(home, "forward", 2, loss_type="l2t", skip_eval=True)
    assert "cannot encode texts" in latents(capsys, "encode", str(run), "--text", "the cat", code=2)
    assert "cannot make texts from noise" in latents(capsys, "sample", str(run), code=2)
    assert main(["generate", str(run), "--prompt", "hello"]) == 2
    assert f'use: crosstune latents decode {run} --text "..."' in capsys.readouterr().err
