"""Open a trained latent-diffusion model for decoding, encoding and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.missing_paths import missing_run
from crosstune.recipes.latent_diffusion.encoders import UNRECORDED, Encoder, open_encoder_of
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, load_array, normalise_vectors
from crosstune.recipes.latent_diffusion.settings import SETTINGS, ModelSettings, load_settings
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler

_CANNOT = {
    "l2t": "decode vectors",
    "t2l": "encode texts",
    "unconditional": "make texts from noise",
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    folder: Path
    settings: ModelSettings
    facts: dict[str, Any]
    """The trained modes and the encoder's record."""
    vocabulary: Vocabulary
    sampler: Sampler

    def check_mode(self, needed: str) -> None:
        """Raise if the model was not trained for a mode. Unconditional training covers the other two as well."""
        modes = set(self.facts["modes"])
        if needed in modes or (needed != "unconditional" and "unconditional" in modes):
            return
        cannot, trained_with = _CANNOT[needed], " and ".join(sorted(modes))
        raise UserError(
            f"The model {self.folder} cannot {cannot}.",
            why=f"it was trained with --loss_type {trained_with} alone.",
            do=f"train one with --loss_type {needed} or random",
        )

    def tokens_of(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids and lengths of texts; raise for a text that is empty or too long."""
        rows = self.vocabulary.encode(texts)
        for text, length in zip(texts, rows.lengths.tolist(), strict=True):
            if not 1 <= length <= self.settings.max_tokens:
                raise UserError(
                    f"The text {text[:60]!r} has {length} tokens.",
                    why=f"the model reads 1 to {self.settings.max_tokens}.",
                    do="give a shorter text" if length else "give a text",
                )
        return rows.stack(width=self.settings.max_tokens), rows.lengths

    def vectors_of(self, path: Path) -> tuple[NDArray[Any], int]:
        """Return the normalised vectors of an .npy file, and how many had a different norm."""
        vectors = load_array(path)
        if vectors.ndim == 1:
            vectors = vectors[None]
        check_dim(vectors, self.settings.latent_dim, source=str(path))
        return normalise_vectors(vectors, source=str(path))

    def encoder(self, name: str | None = None, **options: Any) -> Encoder:
        """Open the encoder that the model was trained with."""
        return open_encoder_of(self.facts, encoder=name, **options)

    def can_embed(self, name: str | None = None) -> bool:
        """Return whether the encoder is known, so that decoded texts can be embedded again."""
        return name is not None or self.facts["encoder"].get("kind") not in UNRECORDED

    def check_data(self, pairs: PairFolder) -> None:
        """Raise unless pairs have the dimension, tokenizer and encoder of the model's training data."""
        check_dim(pairs.splits["train"].latents, self.settings.latent_dim, source=str(pairs.folder))
        if pairs.manifest["encoder"].get("sha256") != self.facts["encoder"].get("sha256"):
            raise UserError(
                f"The vectors of {pairs.folder} were not made by the model's encoder.",
                why=f"they come from {pairs.manifest['encoder'].get('name')}, and the model was trained with "
                f"{self.facts['encoder'].get('name')}.",
                do="build the pairs with the model's encoder",
            )
        if pairs.vocabulary.digest != self.vocabulary.digest:
            raise UserError(f"The tokenizer of {pairs.folder} is not the model's.")


def check_dim(vectors: NDArray[Any], dim: int, *, source: str) -> None:
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or vectors.shape[1] != dim:
        raise UserError(
            f"The vectors of {source} do not fit the model.",
            why=f"they are {vectors.dtype} {list(vectors.shape)}, and the model reads {dim} dimensions.",
            do="embed the texts with the encoder that the model was trained with",
        )


def open_trained(path: Path, *, device: str | None = None, dtype: str = "fp32") -> Trained:
    """Open a run of the recipe, or the model folder in it."""
    if not path.exists():
        raise missing_run(path)
    folder = path / "model" if (path / "model" / SETTINGS).is_file() else path
    if not (folder / SETTINGS).is_file():
        raise UserError(
            f"{path} holds no trained latent-diffusion model.",
            why=f"there is no {SETTINGS} in it.",
            do="give the folder of a finished run: crosstune train --recipe latent_diffusion",
        )
    settings, facts = load_settings(folder)
    if not isinstance(facts.get("encoder"), dict) or not isinstance(facts.get("modes"), list):
        raise UserError(f"{folder / SETTINGS} is incomplete.", why="it names no encoder or no modes.")
    from crosstune.recipes.latent_diffusion.torch_parts import choose_device
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import load_sampler

    return Trained(
        folder=folder,
        settings=settings,
        facts=facts,
        vocabulary=load_vocabulary(folder),
        sampler=load_sampler(folder, settings, device=choose_device(device), dtype=dtype),
    )
