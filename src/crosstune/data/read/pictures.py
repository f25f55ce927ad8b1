"""Read the pictures of rows: find their references in messages and columns, check the files, and decode them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import LIBRARY_FAULTS, UserError, shown
from crosstune.files.plain_files import UnreadableFile, read_plain

if TYPE_CHECKING:
    from PIL.Image import Image

Turn = dict[str, Any]

IN_TEXT = "\ufdd1"
"""Stands for a picture in the text of a message, until the chat template is rendered. No text has this character."""
PICTURES = "pictures"
"""The key of a message with the references of its pictures, in order."""
COLUMNS = ("images", "image")
PICTURE_TYPES = ("image", "image_url")
WRITTEN = "<image>"
"""Marks the place of a picture of a column in the text."""
MOST_BYTES = 64 << 20
MOST_PIXELS = 64_000_000
INSTALL_VISION = 'pip install "crosstune[vision]"'
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that Pillow decodes itself; for others it would run programs."""
_FAULTS = (*LIBRARY_FAULTS, SyntaxError, EOFError, struct.error, zlib.error)
"""Errors that Pillow raises for damaged pictures."""
_KEYS = ("path", "image", "url", "image_url", "base64", "bytes")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag of the orientation, and its values for a picture that lies on its side."""
_SENDER = "write the picture to a file next to the data, and name its path"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A checked picture of a row."""

    width: int
    height: int
    sha256: str
    """Hash of the file's contents."""
    path: str = ""
    data: str = ""
    """The contents in base64, if the row has them."""
    tokens: int = 0
    """The tokens of the picture in its row."""
    animated: bool = False
    """True if the file has more frames than the first, which is used."""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}

    def load(self) -> Image:
        """Return the picture in RGB; raise if its file has changed since it was checked."""
        raw = base64.b64decode(self.data) if self.data else _read_file(Path(self.path))
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            raise UserError(
                f"The picture {self.path} has changed since the data was read.",
                do="do not write to the data while a run reads it; start the run again",
            )
        return _decode(raw, self.path or "in the row")[0]


def picture_parts(content: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the text of a list of parts, with `IN_TEXT` for each picture, and the references of the pictures."""
    pieces: list[str] = []
    found: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            pieces.append(str(part["text"]))
        elif kind in PICTURE_TYPES:
            given = {key: part[key] for key in _KEYS if part.get(key) is not None}
            pieces.append(IN_TEXT if given else WRITTEN)  # a bare part stands for a picture of a column
            found += [given] * bool(given)
        else:
            raise UserError(
                "A part of a message must be text or an image.",
                why=f"found {shown(part)}.",
                do='write {"type": "text", "text": ...} or {"type": "image", "path": ...}',
            )
    return "".join(pieces), found


def place_pictures(turns: Sequence[Turn], row: Mapping[str, Any]) -> list[Turn]:
    """Return the messages with the pictures of the row's columns at each `<image>`; raise if the numbers differ."""
    waiting = _of_columns(row)
    in_parts = sum(len(turn.get(PICTURES, ())) for turn in turns)
    if in_parts and waiting:
        raise UserError(
            "It has pictures in its messages and in a column.",
            do="keep the parts of the messages, or the column",
        )
    placed = []
    num_places = sum(turn["content"].count(WRITTEN) for turn in turns) if not in_parts else 0
    if num_places != len(waiting) and not in_parts:
        raise UserError(
            f"It has {_count(len(waiting), 'picture')}, but {WRITTEN} occurs {_count(num_places, 'time')} in its text.",
            do=f"write {WRITTEN} once for each picture, where the model should see it",
        )
    for turn in turns:
        content, count = turn["content"], turn["content"].count(WRITTEN)
        if count and waiting:
            turn = {**turn, "content": content.replace(WRITTEN, IN_TEXT), PICTURES: waiting[:count]}
            waiting = waiting[count:]
        if turn.get(PICTURES) and turn["role"] not in ("user", "tool"):
            raise UserError(
                f"A message of the {turn['role']} has a picture.",
                why="the model reads pictures, and does not write them.",
                do="move the picture to a message of the user",
            )
        placed.append(turn)
    return placed


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts, as the templates of vision-language models read it."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(IN_TEXT)):
        parts += [{"type": "image"}] * bool(number)
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


def open_pictures(turns: Sequence[Turn], folder: Path | None, *, decode: bool = True) -> list[Picture]:
    """Return the pictures of messages in order, and remove their references. Paths are relative to `folder`, the folder of
    the data file. Without `decode`, only headers are read."""
    return [open_picture(one, folder, decode=decode) for turn in turns for one in turn.pop(PICTURES, ())]


def open_picture(reference: Any, folder: Path | None, *, decode: bool = True) -> Picture:
    """Check a picture that a row refers to."""
    found = _reference(reference)
    if isinstance(found, str) and not found.startswith("data:"):
        path = _inside(found, folder)
        raw, name = _read_file(path), str(path)
    else:
        path, name = None, "in the row"
        raw = found if isinstance(found, bytes) else _decode_text(found.partition(",")[2])
        if len(raw) > MOST_BYTES:
            raise UserError(
                f"The picture {name} has {len(raw) >> 20} MiB.",
                why=f"at most {MOST_BYTES >> 20} MiB are read.",
                do="save it smaller",
            )
    _, (width, height), is_animated = _decode(raw, name, pixels=decode)
    return Picture(
        width=width,
        height=height,
        sha256=hashlib.sha256(raw).hexdigest(),
        path=str(path) if path is not None else "",
        data="" if path is not None else base64.b64encode(raw).decode(),
        animated=is_animated,
    )


def thumbnail(picture: Picture, *, side: int = 128) -> str:
    """Return a small version of a picture as a data URI."""
    image = picture.load()
    image.thumbnail((side, side))
    held = io.BytesIO()
    image.save(held, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"


def _of_columns(row: Mapping[str, Any]) -> list[Any]:
    """Return the references in the columns of a row."""
    found: list[Any] = []
    for name in COLUMNS:
        value = row.get(name)
        if value in (None, "", []):
            continue
        found += value if isinstance(value, list) else [value]
    return found


def _reference(value: Any) -> str | bytes:
    """Return the path, the data URI or the bytes that a reference contains."""
    for _ in range(2):  # OpenAI nests {"image_url": {"url": ...}}
        if not isinstance(value, Mapping):
            break
        if isinstance(value.get("base64"), str):
            return f"data:,{value['base64'].rpartition(',')[2]}"
        given = [value[key] for key in ("bytes", *_KEYS) if value.get(key) is not None]
        value = given[0] if given else None
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise UserError(
            "It has a picture without a path or contents.",
            why=f"found {shown(value)}.",
            do='name its file with "path", or pass its contents with "base64"',
        )
    if value.startswith(("http://", "https://")):
        raise UserError(f"The picture {shown(value)} is not downloaded.", do=_SENDER)
    return value.removeprefix("file://")


def _inside(name: str, folder: Path | None) -> Path:
    """Return the path of a picture below the data's folder."""
    if folder is None:
        raise UserError(
            f"The picture {shown(name)} has no folder.", why="this data is not a local file.", do=_SENDER
        )
    try:
        path, root = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, or a NUL character
        raise UserError(f"The picture {shown(name)} cannot be found.", why=f"{error}.") from error
    if not path.is_relative_to(root):
        raise UserError(
            f"The picture {shown(name)} is outside the folder of the data.",
            why=f"pictures are read below {root} only.",
            do="copy it there, and name its path relative to the data file",
        )
    return path


def _read_file(path: Path) -> bytes:
    try:
        return read_plain(path, limit=MOST_BYTES)
    except UnreadableFile as error:
        raise UserError(f"The picture {path} cannot be read.", why=error.why, do=error.do) from error


def _decode_text(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError("A picture is not base64.", why=f"{error}.") from error


def _decode(raw: bytes, name: str, *, pixels: bool = True) -> tuple[Image, tuple[int, int], bool]:
    """Return a picture, upright in RGB if its `pixels` are decoded, its upright size, and whether it is animated."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise UserError("Pictures need Pillow.", do=f"run: {INSTALL_VISION}") from error
    try:
        picture: Any = Image.open(io.BytesIO(raw), formats=_FORMATS)
        width, height = picture.size
        if width * height > MOST_PIXELS or not width * height:
            raise UserError(
                f"The picture {name} has {width} x {height} pixels.",
                why=f"pictures may have at most {MOST_PIXELS // 10**6} million pixels.",
                do="save it smaller",
            )
        is_animated = bool(getattr(picture, "is_animated", False))
        if picture.getexif().get(_ORIENTATION, 1) in _TURNED:
            width, height = height, width
        if pixels:
            picture.load()
            picture = ImageOps.exif_transpose(picture).convert("RGB")
        return picture, (width, height), is_animated
    except Image.DecompressionBombError as error:
        raise UserError(
            f"The picture {name} is too large to decode.", why=f"{error}.", do="save it smaller"
        ) from error
    except _FAULTS as error:
        known = ", ".join(_FORMATS)
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(error, UnidentifiedImageError):  # its text names an object in memory
            why = "its contents are in none of the known formats."
        raise UserError(
            f"The picture {name} cannot be decoded.", why=why, do=f"save it again as one of: {known}"
        ) from error


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
