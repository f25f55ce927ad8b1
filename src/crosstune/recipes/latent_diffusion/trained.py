"""Open a trained latent-diffusion model, and decode, encode or sample with it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.journal import Journal, file_stamps
from crosstune.files.json_files import to_json
from crosstune.files.outputs import is_stream, write_output
from crosstune.files.paths import missing_run
from crosstune.recipes.latent_diffusion.correction import correct_texts
from crosstune.recipes.latent_diffusion.encoders import UNRECORDED, Encoder, open_encoder_of
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, count_changed, load_array, vector_norms
from crosstune.recipes.latent_diffusion.settings import (
    SETTINGS,
    DecodeOptions,
    ModelSettings,
    OnStep,
    load_settings,
)
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, load_vocabulary, tokenize

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler

_BLOCK = 512
"""Vectors that are decoded and kept together."""
_CANNOT = {
    "l2t": "decode vectors",
    "t2l": "encode texts",
    "unconditional": "make texts from noise",
}


def open_trained(path: Path, *, device: str | None = None, encoder: str | None = None) -> Trained:
    """Open a latent-diffusion run, or its model folder. `encoder`: the folder of the encoder, if it is not recorded."""
    if not path.exists():
        raise missing_run(path)
    folder = path / "model" if (path / "model" / SETTINGS).is_file() else path
    if not (folder / SETTINGS).is_file():
        raise UserError(
            f"{path} contains no trained latent-diffusion model.",
            why=f"{SETTINGS} is missing.",
            do="pass the folder of a finished run: crosstune train --recipe latent_diffusion",
        )
    settings, facts = load_settings(folder)
    if not isinstance(facts.get("encoder"), dict) or not isinstance(facts.get("modes"), list):
        raise UserError(
            f"{folder / SETTINGS} is incomplete.", why="it does not specify an encoder or the modes."
        )
    from crosstune.recipes.latent_diffusion.torch_parts import choose_device
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import load_sampler

    return Trained(
        folder=folder,
        facts=facts,
        encoder=encoder,
        device=device,
        vocabulary=load_vocabulary(folder),
        sampler=load_sampler(folder, settings, device=choose_device(device)),
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    folder: Path
    facts: dict[str, Any]
    """The trained modes and the encoder's record."""
    encoder: str | None
    """The folder of the encoder; None: as recorded."""
    device: str | None
    vocabulary: Vocabulary
    sampler: Sampler

    @property
    def settings(self) -> ModelSettings:
        return self.sampler.settings

    def check_mode(self, needed: str) -> None:
        """Raise if the model was not trained for a mode. Unconditional training includes the other two."""
        modes = set(self.facts["modes"])
        if needed in modes or (needed != "unconditional" and "unconditional" in modes):
            return
        raise UserError(
            f"The model {self.folder} cannot {_CANNOT[needed]}.",
            why=f"it was trained only with --loss_type {' and '.join(sorted(modes))}.",
            do=f"train one with --loss_type {needed} or random",
        )

    def tokens_of(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids and lengths of texts; raise for a text that is empty or too long."""
        rows = self.vocabulary.reduce(tokenize(self.vocabulary.tokenizer, texts))
        for text, length in zip(texts, rows.lengths.tolist(), strict=True):
            if not 1 <= length <= self.settings.max_tokens:
                raise UserError(
                    f"The text {text[:60]!r} has {length} tokens.",
                    why=f"the model reads 1 to {self.settings.max_tokens}.",
                    do="use a shorter text" if length else "pass a text",
                )
        return rows.stack(width=self.settings.max_tokens), rows.lengths

    def vectors_of(self, path: Path) -> tuple[NDArray[Any], int]:
        """Return the vectors of an .npy file with norm 1, and the number whose norm was not 1."""
        vectors = load_array(path)
        if vectors.ndim == 1:
            vectors = vectors[None]
        _check_dim(vectors, self.settings.latent_dim, source=str(path))
        if not len(vectors):
            raise UserError(
                f"{path} contains no vectors.",
                why="the array has 0 rows.",
                do="pass an array with a row for each vector",
            )
        norms = vector_norms(vectors, source=str(path))
        return np.asarray(vectors, np.float32) / norms, count_changed(norms)

    def open_encoder(self) -> Encoder:
        """Open the encoder that the model was trained with."""
        return open_encoder_of(self.facts, encoder=self.encoder, device=self.device)

    def find_encoder(self) -> Encoder | None:
        """Open the encoder if it is known, so that decoded texts can be embedded."""
        is_known = self.encoder is not None or self.facts["encoder"].get("kind") not in UNRECORDED
        return self.open_encoder() if is_known else None

    def check_data(self, pairs: PairFolder) -> None:
        """Raise unless pairs have the dimension, tokenizer and encoder of the model's training data."""
        _check_dim(pairs.splits["train"].latents, self.settings.latent_dim, source=str(pairs.folder))
        if pairs.manifest["encoder"].get("sha256") != self.facts["encoder"].get("sha256"):
            raise UserError(
                f"The vectors of {pairs.folder} were not made by the model's encoder.",
                why=f"their encoder is {pairs.manifest['encoder'].get('name')}, and the model's is "
                f"{self.facts['encoder'].get('name')}.",
                do="build the pairs with the model's encoder",
            )
        if pairs.vocabulary.digest != self.vocabulary.digest:
            raise UserError(f"The tokenizer of {pairs.folder} is not the model's.")


def _check_dim(vectors: NDArray[Any], dim: int, *, source: str) -> None:
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or vectors.shape[1] != dim:
        raise UserError(
            f"The vectors of {source} do not match the model.",
            why=f"they are {vectors.dtype} {list(vectors.shape)}, and the model reads {dim} dimensions.",
            do="embed the texts with the encoder that the model was trained with",
        )


def decode(
    trained: Trained,
    *,
    vectors: Path | None,
    texts: list[str],
    options: DecodeOptions,
    rounds: int = 0,
    out: Path | None = None,
    on_step: OnStep | None = None,
    on_round: Callable[[int, float], None] | None = None,
    on_done: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Decode the vectors of an .npy file or the embeddings of texts, with `rounds` of correction; write the texts to `out`.

    Return the texts, with their cosine if the encoder was opened, and notes. With `out`, vectors are decoded in blocks, and
    finished blocks are kept next to it. `on_done` gets the number of decoded vectors and their total.
    """
    trained.check_mode("l2t")
    opened = trained.open_encoder() if texts or rounds else None
    notes: list[str] = []
    if vectors is not None:
        latents, changed = trained.vectors_of(vectors)
        if changed:
            notes.append(f"{changed:,} vectors did not have norm 1 and were normalized")
    else:
        assert opened is not None
        latents = opened.encode(texts)

    def decode_block(block: NDArray[Any], options: DecodeOptions) -> list[dict[str, Any]]:
        if not rounds:
            tokens = trained.sampler.decode(block, options=options, on_step=on_step).tokens
            return _rows(trained, tokens, block, encoder=opened)
        assert opened is not None
        parts = (trained.sampler, opened, trained.vocabulary)
        rounds_of = correct_texts(*parts, block, options=options, rounds=rounds, on_step=on_step)
        for number, best in enumerate(rounds_of):
            tokens = best.tokens
            if number and on_round is not None:
                on_round(number, float(best.cosine.mean()))
        return _rows(trained, tokens, block, encoder=opened)

    if out is None:
        return {"texts": decode_block(latents, options), "notes": notes}
    asked = {
        "files": file_stamps(trained.folder, vectors),
        "texts": texts,
        "options": asdict(options),
        "encoder": trained.encoder,
        "rounds": rounds,
    }
    with Journal(out, asked, say=say, block=_BLOCK) as journal:
        for start in range(len(journal.rows), len(latents), _BLOCK):
            # Different noise for each block.
            journal.add(
                decode_block(latents[start : start + _BLOCK], replace(options, seed=options.seed + start))
            )
            if on_done is not None:
                on_done(len(journal.rows), len(latents))
        write_output(out, "".join(f"{to_json(row)}\n" for row in journal.rows).encode())
        journal.remove()
    return {"texts": journal.rows, "notes": notes}


def sample(
    trained: Trained,
    count: int,
    *,
    options: DecodeOptions,
    out: Path | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Generate texts and vectors together; write the vectors to `out`, an .npy file.

    Return the texts, with the cosine between embedding and vector if the encoder is known.
    """
    trained.check_mode("unconditional")
    opened = trained.find_encoder()
    found = trained.sampler.generate(count, options=options, on_step=on_step)
    _write_vectors(out, found.vectors)
    return {"texts": _rows(trained, found.tokens, found.vectors, encoder=opened)}


def encode(
    trained: Trained, texts: list[str], *, steps: int, guidance: float, seed: int, out: Path | None
) -> dict[str, Any]:
    """Return a vector for each text, and write the vectors to `out`, an .npy file."""
    trained.check_mode("t2l")
    tokens, lengths = trained.tokens_of(texts)
    vectors = trained.sampler.encode(tokens, lengths, steps=steps, guidance=guidance, seed=seed)
    _write_vectors(out, vectors)
    return {"vectors": vectors.tolist()}


def _rows(trained: Trained, tokens: Any, latents: Any, *, encoder: Encoder | None) -> list[dict[str, Any]]:
    """Return the texts of token ids, with their cosine to the vectors if there is an encoder."""
    texts = trained.vocabulary.decode_batch(tokens)
    if encoder is None:
        return [{"text": text} for text in texts]
    cosines = (encoder.encode(texts) * latents).sum(-1).tolist()
    return [{"text": text, "cosine": near} for text, near in zip(texts, cosines, strict=True)]


def _write_vectors(path: Path | None, vectors: Any) -> None:
    if path is None:
        return
    if not is_stream(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    np.save(file, vectors)
    write_output(path, file.getvalue())
