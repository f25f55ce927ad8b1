"""Tokenize rendered conversations, so that a training row begins with the tokens of its generation prompt; insert the tokens
of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import IntArray
from crosstune.data.read.pictures import Picture
from crosstune.data.render.types import Rendered
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.estimate.vision import Vision

if TYPE_CHECKING:
    from tokenizers import Encoding

# Characters to encode a piece after: some tokenizers write a space before the first word of a text.
_ANCHORS = ("", "\n", "!")


class Encoded(NamedTuple):
    """The tokens of a conversation and their loss mask."""

    tokens: IntArray
    supervised: NDArray[np.bool_]
    joined: str = ""
    """A token with the end of a prompt and the beginning of its answer that cannot be split."""
    pictures: tuple[Picture, ...] = ()
    picture_end: int = 0
    """The place after the last token of a picture."""
    prompt: IntArray | None = None
    """The tokens before the first answer, if they carry loss too."""


def encode_rendered(
    rendered: Rendered, encoding: Encoding, tokenizer: Tokenizer, *, compare_all: bool
) -> Encoded:
    """Return the tokens of a rendered text. It is split where a prompt ends if the prompt alone has different tokens: its last
    characters would form a token with the answer. Only prompts that end within a token are compared, or all of them."""
    text = rendered.text
    ends = [
        end
        for end in sorted(set(rendered.prompt_ends if tokenizer.data_rules > 1 else ()))
        if (compare_all or _is_within_token(encoding, end))
        and not begins_with(encoding, text[:end], tokenizer)
    ]
    if not ends:
        return Encoded(
            np.asarray(encoding.ids, dtype=np.int32), mask_of(encoding, rendered, tokenizer.stripping)
        )
    pieces = list(zip([0, *ends], [*ends, len(text)], strict=True))
    for anchor in _ANCHORS:
        parts = [
            _encode_piece(rendered, piece, tokenizer, anchor=anchor if piece[0] else "") for piece in pieces
        ]
        tokens = np.concatenate([part.tokens for part in parts])
        if _decoded(tokens.tolist(), tokenizer) == _decoded(encoding.ids, tokenizer):
            return Encoded(tokens, np.concatenate([part.supervised for part in parts]))
    token = encoding.char_to_token(ends[0])
    joined = _decoded([encoding.ids[token]], tokenizer) if token is not None else text[ends[0] - 1 :][:1]
    return Encoded(
        np.asarray(encoding.ids, dtype=np.int32), mask_of(encoding, rendered, tokenizer.stripping), joined
    )


def _is_within_token(encoding: Encoding, place: int) -> bool:
    token = encoding.char_to_token(place)
    span = encoding.token_to_chars(token) if token is not None else None
    return span is not None and span[0] < place


def begins_with(encoding: Encoding, prompt: str, tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(prompt).ids
    return bool(encoding.ids[: len(ids)] == ids)


def _encode_piece(
    rendered: Rendered, piece: tuple[int, int], tokenizer: Tokenizer, *, anchor: str
) -> Encoded:
    """Return the tokens of a piece of a text, encoded after `anchor`."""
    start, end = piece
    shift = len(anchor) - start
    spans = [
        (max(first, start) + shift, min(last, end) + shift)
        for first, last in rendered.spans
        if max(first, start) < min(last, end)
    ]
    part = Rendered(text=anchor + rendered.text[start:end], spans=spans)
    encoding = tokenizer.encode(part.text)
    skipped = len(tokenizer.encode(anchor).ids) if anchor else 0
    return Encoded(
        np.asarray(encoding.ids[skipped:], dtype=np.int32),
        mask_of(encoding, part, tokenizer.stripping)[skipped:],
    )


def _decoded(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids, keep_special=True)


def mask_of(
    encoding: Encoding, rendered: Rendered, stripping: Mapping[int, str] | None = None
) -> NDArray[np.bool_]:
    """Return the mask of tokens that have a character inside a span. An added token that strips white space (`stripping`:
    id -> text) is located by its own text only, so that a header is not supervised because of the white space after it."""
    if list(rendered.spans) == [(0, len(rendered.text))]:
        return np.ones(len(encoding.ids), dtype=np.bool_)
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in rendered.spans:
        first = _token_at(encoding, range(start, end))
        last = _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        # One character can be multiple tokens, one for each byte.
        while last + 1 < len(mask) and _starts_before(encoding, last + 1, end):
            last += 1
        own = [(stripping or {}).get(encoding.ids[token]) for token in (first, last)]
        if own[0] and own[0] in rendered.text[encoding.offsets[first][0] : start]:
            first += 1
        if own[1] and own[1] in rendered.text[end : encoding.offsets[last][1]]:
            last -= 1
        mask[first : last + 1] = True
    return mask


def _token_at(encoding: Encoding, characters: range) -> int | None:
    """Return the token of the first of these characters that has one; tokenizers drop some whitespace."""
    for character in characters:
        token = encoding.char_to_token(character)
        if token is not None:
            return int(token)
    return None


def _starts_before(encoding: Encoding, token: int, end: int) -> bool:
    place = encoding.token_to_chars(token)
    return place is not None and place[0] < end and place[1] > place[0]


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
