"""Decode held-out vectors with the model of `latent_text.py`: choose options, one pass, then rounds of correction."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from latent_scores import compare_vectors, score

TUNING_TEXTS = 250
CORRECTION_STEPS = 8
"""Steps of the texts that correction starts from: rounds improve them more than further steps would."""
LAST_S = 3.0
"""For the scores at the end."""


@dataclass(kw_only=True)
class Decoding:
    """The inputs of decoding; results are added to `facts`, and saved after each stage."""

    run: Path
    pairs: Path
    encoder_folder: Path
    facts: dict[str, Any]
    file: Path
    save: Callable[[], None]
    say: Callable[[str], None]
    left_s: Callable[[], float]
    rounds: int
    candidates: int

    def decode(self) -> None:
        import torch

        from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
        from crosstune.recipes.latent_diffusion.trained import open_trained

        torch.set_float32_matmul_precision("high")  # TF32 on a GPU: several times as fast as full fp32
        self.trained = open_trained(self.run, encoder=str(self.encoder_folder))
        self.encoder = self.trained.open_encoder()
        held_out = open_pairs(self.pairs).splits["validation"]
        half = len(held_out) // 2
        tuning, test = held_out.part(0, half), held_out.part(half, len(held_out))
        best = self.tune(tuning.part(0, min(len(tuning), TUNING_TEXTS)))
        vectors = np.asarray(test.latents, np.float32)
        self.one_pass(vectors, self.trained.vocabulary.normalize(test.texts), best)
        self.correct(vectors, replace(best, steps=CORRECTION_STEPS, num_lengths=1))
        score(self.file)

    def texts_of(self, latents: Any, options: Any) -> list[str]:
        found = self.trained.sampler.decode(latents, options=options)
        return self.trained.vocabulary.decode_batch(found.tokens)

    def tune(self, tuning: Any) -> Any:
        """Return the best decoding options for some texts, by BLEU if sacrebleu is installed."""
        from crosstune.recipes.latent_diffusion.evaluation import cosine, has_sacrebleu, text_scores
        from crosstune.recipes.latent_diffusion.settings import DecodeOptions

        began = time.monotonic()
        vectors = np.asarray(tuning.latents, np.float32)
        expected = self.trained.vocabulary.normalize(tuning.texts)
        tried: list[dict[str, Any]] = []

        def better(known: DecodeOptions, *changes: dict[str, Any]) -> DecodeOptions:
            """Decode with each change; return the best options so far."""
            for options in [replace(known, **change) for change in changes]:
                texts = self.texts_of(vectors, options)
                bleu = text_scores(texts, expected)["bleu"] if has_sacrebleu() else None
                near = cosine(self.encoder.encode(texts), vectors)
                tried.append({"bleu": bleu, "cosine": near, "options": vars(options)})
            best = max(tried, key=lambda item: item["cosine"] if item["bleu"] is None else item["bleu"])
            return DecodeOptions(**best["options"])

        best = better(DecodeOptions(steps=8), {}, {"guidance": 1.5}, {"guidance": 2.0})
        best = better(best, {"steps": 16}, {"steps": 24})
        best = better(best, {"num_lengths": 3})
        self.say(f"chosen in {time.monotonic() - began:.1f} s: {best}")
        self.facts |= {"tried": tried, "chosen": vars(best), "tuning_s": time.monotonic() - began}
        return best

    def one_pass(self, vectors: Any, references: list[str], best: Any) -> None:
        from crosstune.recipes.latent_diffusion.settings import DecodeOptions

        began = time.monotonic()
        single = self.texts_of(vectors, best)
        self.facts["decode_texts_per_s"] = len(single) / (time.monotonic() - began)
        self.facts["texts"] = {
            "reference": references,
            "single_pass": single,
            "single_pass_8_steps": self.texts_of(vectors, DecodeOptions(steps=8)),
            "shuffled": self.texts_of(np.roll(vectors, 1, axis=0), best),
        }
        self.facts["embedded"] = {"single_pass": compare_vectors(self.encoder.encode(single), vectors)}
        self.say("decoded in one pass")
        self.save()
        score(self.file)

    def correct(self, vectors: Any, options: Any) -> None:
        """Correct the texts in rounds until the time is over; keep the results of each round."""
        from crosstune.recipes.latent_diffusion.correction import correct_texts

        began = time.monotonic()
        ends: list[float] = []
        for number, best in enumerate(
            correct_texts(
                self.trained.sampler,
                self.encoder,
                self.trained.vocabulary,
                vectors,
                options=options,
                rounds=self.rounds,
                candidates=self.candidates,
            )
        ):
            ends.append(time.monotonic())
            if not number:
                continue
            last_s = ends[-1] - ends[-2]
            near = float(best.cosine.mean())
            self.say(f"round {number}/{self.rounds}: cosine {near:.4f}, {last_s:.1f} s")
            corrected = self.trained.vocabulary.decode_batch(best.tokens)
            self.facts["correction"] = {"rounds": number, "seconds": ends[-1] - began}
            self.facts["embedded"]["corrected"] = compare_vectors(self.encoder.encode(corrected), vectors)
            self.facts["texts"]["corrected"] = corrected
            self.save()
            if self.left_s() <= 1.3 * last_s + LAST_S:
                break
