"""How many tokens pictures become, and what no row with pictures may lose."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vision_models import FAMILIES as VISION_FAMILIES
from vision_models import draw, write_folder

from crosstune.core.errors import UserError
from crosstune.data.read.sources import open_source
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.tokens.corpus import Corpus, open_corpus
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.estimate.vision import FAMILIES, Vision

GRID: dict[str, Any] = {
    "soft_id": 1,
    "patch": 14,
    "merge": 2,
    "fewest_pixels": 56 * 56,
    "most_pixels": 28 * 28 * 20,
}


def test_counts_are_those_of_the_image_processors() -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rng = random.Random(0)
    sizes = [(rng.randint(5, 300), rng.randint(5, 300)) for _ in range(40)] + [(64, 64), (10, 200)]
    vision = Vision(family=FAMILIES["qwen2_5_vl"], **GRID)
    reads = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20})
    tiles = Vision(family=FAMILIES["idefics3"], soft_id=1, tile=16, longest=72, num_soft=4)
    splits = Idefics3ImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 16})
    for width, height in sizes:
        picture = Image.new("RGB", (width, height), (9, 30, 50))
        _, rows, columns = reads(images=[picture], return_tensors="np")["image_grid_thw"][0]
        assert vision.grid(width, height) == (rows // 2, columns // 2)
        assert vision.num_patches(width, height) == rows * columns
        found = splits(images=[picture], return_tensors="np", return_row_col_info=True)
        assert tiles.grid(width, height) == (found["rows"][0][0], found["cols"][0][0])
    assert vision.limited(28 * 28 * 4).num_tokens(500, 500) == 4
    assert tiles.limited(32 * 32).num_patches(500, 500) < tiles.num_patches(500, 500)
    with pytest.raises(UserError, match="too narrow"):
        vision.grid(1, 500)
    with pytest.raises(UserError, match="--image_pixels 20 is too small"):
        vision.limited(20)


def corpus_of(
    tmp_path: Path, rows: list[dict[str, Any]], *, family: str = "qwen2_5_vl", **options: Any
) -> Corpus:
    folder = write_folder(tmp_path / "model", family)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"context_length": 2048, "truncation": "error"} | options
    return open_corpus(
        open_source(str(path)),
        Tokenizer.from_folder(folder).with_vision(folder, pixels=None),
        asked_format="auto",
        whole=False,
        **settings,
    )


def row_of(name: str, answer: str, *, before: str = "") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": before or "?"}, {"type": "image", "path": name}]}, {"role": "assistant", "content": answer}]}  # fmt: skip


def test_no_token_of_a_picture_is_cut_or_supervised(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "red")
    rows = [
        row_of("a.png", "one"),
        row_of("a.png", "one two three " * 20),
        row_of("a.png", "two", before="one " * 60),
    ]
    whole = corpus_of(tmp_path, rows)
    soft = FAMILIES["qwen2_5_vl"].soft_token
    token = Tokenizer.from_folder(tmp_path / "model").rust.token_to_id(soft)
    assert all(not example.supervised[example.tokens == token].any() for example in whole)
    [picture] = whole[0].pictures
    assert picture.tokens == (whole[0].tokens == token).sum() > 4
    cut = corpus_of(tmp_path, rows, context_length=60, truncation="cut")
    assert [example.index for example in cut] == [0, 1]
    assert (len(cut[1].tokens), cut.dropped, cut.stats["pictures"]) == (60, 1, 2)
    assert all((example.tokens == token).sum() == picture.tokens for example in cut)


def test_other_pictures_make_other_examples(tmp_path: Path) -> None:
    for name, colour in (("a.png", "red"), ("b.png", "blue"), ("c.png", "red")):
        draw(tmp_path, name, colour)
    found = corpus_of(tmp_path, [row_of(name, "one") for name in ("a.png", "b.png", "c.png")])
    first, other, same = found.hashes()
    assert first == same != other
    assert len(np.unique(found.store.prompts)) == 2


def test_a_text_with_the_tokens_of_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: The text contains <\|image_pad\|>"):
        corpus_of(tmp_path, [{"prompt": "<|image_pad|>", "completion": "b"}])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_prompts_without_pictures_reach_templates_that_read_parts(tmp_path: Path, family: str) -> None:
    """For chat and for the recipes that read text only."""
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "model", family))
    asked = encode_prompt([{"role": "user", "content": "What colour is this?"}], tokenizer)
    assert "What colour is this?" in tokenizer.decode(asked)
