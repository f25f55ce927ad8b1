"""Replace the placeholder of each picture in a tokenized conversation by the picture's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import IntArray
from crosstune.data.read.pictures import Picture
from crosstune.data.render.encoding import Encoded
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.estimate.vision import Vision


def check_texts(texts: Sequence[str], vision: Vision) -> None:
    """Raise if a text has a token that only a picture may have."""
    family = vision.family
    for name in dict.fromkeys((family.placeholder, family.soft_token, *family.specials)):
        if any(name in text for text in texts):
            raise UserError(
                f"The text contains {name}.",
                why="this model reads it as a part of a picture.",
                do="remove it from the text; pictures are parts of a message, or <image> with a column of images",
            )


def expand_pictures(encoded: Encoded, pictures: Sequence[Picture], tokenizer: Tokenizer) -> Encoded:
    """Insert the pictures' tokens, which carry no loss; also return the position after the last picture."""
    if tokenizer.vision is None:
        return encoded
    placeholder = tokenizer.rust.token_to_id(tokenizer.vision.family.placeholder)
    [places] = (encoded.tokens == placeholder).nonzero()
    if len(places) != len(pictures):
        raise UserError(
            f"The chat template wrote {len(places)} placeholders for {len(pictures)} pictures.",
            why=f"this model needs {tokenizer.vision.family.placeholder} for each.",
            do="use the chat template of the model, which knows pictures",
        )
    tokens, supervised, start, end = list[IntArray](), [], 0, 0
    found = []
    for place, picture in zip(places.tolist(), pictures, strict=True):
        own = picture_tokens(tokenizer, picture.width, picture.height)
        found.append(replace(picture, tokens=len(own)))
        tokens += [encoded.tokens[start:place], own]
        supervised += [encoded.supervised[start:place], np.zeros(len(own), dtype=np.bool_)]
        start = place + 1
        end += len(tokens[-2]) + len(own)
    return encoded._replace(
        tokens=np.concatenate([*tokens, encoded.tokens[start:]]),
        supervised=np.concatenate([*supervised, encoded.supervised[start:]]),
        pictures=tuple(found),
        picture_end=end,
    )


def picture_tokens(tokenizer: Tokenizer, width: int, height: int) -> IntArray:
    """Return the tokens of a picture of this size."""
    assert tokenizer.vision is not None
    return _tokens_of(tokenizer, tuple(tokenizer.vision.pieces(width, height)))


@lru_cache(maxsize=1024)
def _tokens_of(tokenizer: Tokenizer, pieces: tuple[tuple[str, int], ...]) -> IntArray:
    ids: list[int] = []
    for text, count in pieces:
        ids += tokenizer.encode(text).ids * count
    found = np.asarray(ids, dtype=np.int32)
    found.flags.writeable = False
    return found
