"""Latent diffusion on real text: train on WordNet's definitions and examples, decode held-out sentence vectors.

    python benchmarks/latent_text.py pack --out .carry/latents        here: the texts, and the encoder in fp16 (50 MB)
    python benchmarks/latent_text.py run --carry .carry/latents --out OUT --budget_s 560      on the GPU
    python benchmarks/latent_text.py score OUT/latent_text.json       BLEU of the texts in it, with sacrebleu
    python benchmarks/latent_text.py run --carry .carry/latents --out OUT --tiny              to see that it runs

`run` ends within --budget_s seconds: it embeds the texts, measures the time of a step (with compiled blocks on a GPU,
where that works), trains through `crosstune train` until --decode_s seconds are left, chooses guidance and steps by the
BLEU of one half of the held-out texts (by their re-embedding cosine without sacrebleu), and reports the other half: one
pass, the same with shuffled vectors, and decoding by correction until the time is over. It writes latent_text.json after training, after one pass and after each round of correction, and copies the log
of the training beside it while it runs, so that a run that is cut short loses little. A second call with --decode_only
decodes with the model of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from latent_scores import compare_vectors, copied_log, read_evaluations, read_metrics, score

HELD_OUT = 2000
AVERAGED_SHARE = 0.025
"""The average of the weights is over about this share of the steps: a longer one lags behind."""
OVERHEAD_S = 15.0
"""For evaluations, and for writing the model."""
FULL = {
    "hidden_size": 512,
    "n_blocks": 8,
    "latent_tokens": 4,
    "batch_size": 2048,
    "lr": 1e-3,
    "dropout": 0.1,
    "latent_noise": 0.1,
    "precision": "bf16_autocast",
    "optimizer": "fused_adamw",
}
TINY = {
    "hidden_size": 64,
    "n_blocks": 2,
    "latent_tokens": 2,
    "batch_size": 32,
    "lr": 2e-3,
    "dropout": 0.0,
    "precision": "fp32",
}


def pack(out: Path, *, file: Path | None) -> None:
    """Write the texts and the encoder that `run` needs, without anything to download there."""
    from safetensors.numpy import load_file, save_file

    from crosstune.config.load import cache_override
    from crosstune.recipes.latent_diffusion.encoders import MINILM, find_encoder
    from crosstune.recipes.latent_diffusion.wordnet import fetch_wordnet, read_wordnet

    encoder = out / "encoder"
    out.mkdir(parents=True, exist_ok=True)
    source = find_encoder(MINILM, cache=cache_override())
    shutil.copytree(source, encoder, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    halves = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in weights.items()}
    save_file(halves, encoder / "model.safetensors", metadata={"format": "pt"})
    texts = read_wordnet(fetch_wordnet(cache=cache_override(), file=file))
    (out / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{len(texts):,} texts and the encoder: {total / 2**20:.1f} MiB in {out}")


class Bench:
    def __init__(self, own: argparse.Namespace) -> None:
        import torch

        compiles = {"torch_compile": torch.cuda.is_available() and not own.tiny}
        self.own, self.settings = own, compiles | (TINY if own.tiny else FULL)
        self.settings |= {name: json.loads(value) for name, value in own.set or ()}
        self.started = time.monotonic()
        self.facts: dict[str, Any] = {"settings": self.settings, "crops": own.crops}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        return self.own.budget_s - (time.monotonic() - self.started)

    def run(self) -> None:
        own = self.own
        own.out.mkdir(parents=True, exist_ok=True)
        self.file = own.out / "latent_text.json"
        kept = own.work / "facts.json"
        if own.probe:
            self.build()
            self.measure_step()
            self.save()
            return
        if own.decode_only:
            self.facts = json.loads(kept.read_text(encoding="utf-8"))
        else:
            self.build()
            with copied_log(own.work / "runs" / "text", own.out):
                self.say(f"trained {self.train()} steps")
            kept.write_text(json.dumps(self.facts), encoding="utf-8")
            self.save()
        self.decode()

    def save(self) -> None:
        """Write what is known so far, so that a run that is cut short loses little."""
        self.file.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")

    def build(self) -> None:
        from crosstune.recipes.latent_diffusion.build import BuildRequest, build
        from crosstune.recipes.latent_diffusion.write_pairs import WriteOptions

        own = self.own
        began = time.monotonic()
        if own.probe and (own.work / "pairs").is_dir():
            return  # of the probe before
        written = build(
            BuildRequest(
                source=str(own.carry / "texts.txt"),
                out=own.work / "pairs",
                encoder=str(own.carry / "encoder"),
                most_texts=400 if own.tiny else own.max_texts,
                crops=own.crops,
                validation_share=0.25 if own.tiny else 0.05,
                most_validation=HELD_OUT,
                options=WriteOptions(max_tokens=24, too_long="drop", dtype="fp16"),
                on_text=lambda done, total: (
                    self.say(f"embedded {done:,} of {total:,}") if done // 2048 % 10 == 0 else None
                ),
            )
        )
        manifest = {name: value for name, value in written.manifest.items() if name != "files"}
        self.facts["data"] = manifest | {"seconds": time.monotonic() - began}
        self.say(f"pairs: {manifest['splits']}")

    def _options(self) -> dict[str, Any]:
        return {
            "recipe": "latent_diffusion",
            "dataset": str(self.own.work / "pairs"),
            "train_type": "full",
            "output_dir": str(self.own.work / "runs"),
            "overwrite": True,
            "wd": 0.05,
            "save_minutes": 0,
            "skip_nonfinite": 10,
            "result": "last",
            "log_every_n_steps": 100,
            "log_to": "stdout",
            **self.settings,
        }

    def measure_step(self) -> float:
        """Return the seconds of a step. Where compiled blocks fail, try them with plain attention, then none; say so."""
        from crosstune.core.errors import UserError

        ways: list[dict[str, Any]] = [{}]
        if self.settings["torch_compile"]:
            ways += [{"use_flash_attention": False}, {"torch_compile": False}]
        before = self.settings
        for number, way in enumerate(ways, start=1):
            self.settings = before | way
            try:
                step_s = self._measure_step()
                self.facts["settings"] = self.settings
                return step_s
            except (UserError, RuntimeError) as error:  # torch's compiler raises both
                if number == len(ways):
                    raise
                why = f"{error} {getattr(error, 'why', '')}".strip()
                self.say(f"a training with {way or 'these settings'} fails: {why}")
                self.facts.setdefault("failed", []).append({"settings": self.settings, "error": why})
        raise AssertionError("each way returns or raises")

    def _measure_step(self) -> float:
        """Train a few steps, which also compile the blocks for the long training."""
        import crosstune

        began, steps = time.monotonic(), 6 if self.own.tiny else 30
        run = crosstune.train(
            **self._options(), name="probe", max_steps=steps, skip_eval=True, save_model=False
        )
        times = [row["step_s"] for row in read_metrics(run.folder)]
        step_s, seconds = float(np.median(times[steps // 2 :])), time.monotonic() - began
        self.facts["probe"] = {"step_s": step_s, "first_step_s": times[0], "seconds": seconds}
        rate = self.settings["batch_size"] / step_s
        self.say(
            f"a step takes {1000 * step_s:.1f} ms, {rate:,.0f} samples/s; the probe took {seconds:.1f} s"
        )
        return step_s

    def train(self) -> int:
        import crosstune

        own = self.own
        step_s = self.measure_step()
        seconds = self.left_s() - own.decode_s - OVERHEAD_S
        steps = own.steps or (40 if own.tiny else max(500, int(seconds / (1.04 * step_s + 0.0005))))
        self.say(f"training {steps} steps of {self.settings['batch_size']} samples")
        began = time.monotonic()
        run = crosstune.train(
            **self._options(),
            name="text",
            max_steps=steps,
            warmup_steps=min(500, steps // 10),
            cosine_min_lr_ratio=0.02,
            ema_decay=1 - 1 / max(2.0, AVERAGED_SHARE * steps),
            eval_steps=max(1, steps // 5),
            eval_samples=256,
            cfg_dropout_prob=0.05,
            time_limit=None if own.tiny or own.steps else f"{int(self.left_s() - 0.8 * own.decode_s)}s",
        )
        seconds = time.monotonic() - began
        rows = read_metrics(run.folder)
        every = max(1, len(rows) // 200)
        self.facts["training"] = {
            "steps": steps,
            "seconds": seconds,
            "samples": sum(row["examples"] for row in rows),
            "samples_per_s": sum(row["examples"] for row in rows) / sum(row["step_s"] for row in rows),
            "peak_memory_bytes": run.summary.get("peak_memory_bytes"),
            "parameters": run.summary.get("parameters"),
            "curve": [
                {key: row[key] for key in ("step", "loss", "text_loss", "text_accuracy", "nats_per_token")}
                for row in rows[::every]
            ],
            "evaluations": read_evaluations(run.folder),
        }
        return steps

    def decode(self) -> None:
        from crosstune.recipes.latent_diffusion.correct import CorrectOptions, decode_and_correct
        from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
        from crosstune.recipes.latent_diffusion.sampling import Decoded, DecodeOptions
        from crosstune.recipes.latent_diffusion.scores import cosine, has_sacrebleu, text_scores
        from crosstune.recipes.latent_diffusion.trained import open_trained

        own = self.own
        trained = open_trained(own.work / "runs" / "text")
        encoder = trained.encoder(str(own.carry / "encoder"))
        held_out = open_pairs(own.work / "pairs").splits["validation"]
        half = len(held_out) // 2
        tuning, test = held_out.part(0, half), held_out.part(half, len(held_out))
        vectors = np.asarray(test.latents, np.float32)
        references = trained.vocabulary.normalise(test.texts)

        def texts_of(latents: Any, options: DecodeOptions) -> list[str]:
            return trained.vocabulary.decode_batch(trained.sampler.decode(latents, options=options).tokens)

        tuned = tuning.part(0, min(len(tuning), 500))
        some, expected = np.asarray(tuned.latents, np.float32), trained.vocabulary.normalise(tuned.texts)
        tried: list[dict[str, Any]] = []

        def better(known: DecodeOptions, *changes: dict[str, Any]) -> DecodeOptions:
            """Decode the tuning half with each change; return the best options of all so far."""
            for options in [replace(known, **change) for change in changes]:
                texts = texts_of(some, options)
                bleu = text_scores(texts, expected)["bleu"] if has_sacrebleu() else None
                near = cosine(encoder.encode(texts), some)
                tried.append({"bleu": bleu, "cosine": near, "options": vars(options)})
            best = max(tried, key=lambda item: item["cosine"] if item["bleu"] is None else item["bleu"])
            return DecodeOptions(**best["options"])

        best = better(DecodeOptions(steps=8), {}, {"guidance": 1.5}, {"guidance": 2.0})
        best = better(best, {"steps": 16}, {"steps": 24})
        best = better(best, {"num_lengths": 3})
        self.say(f"chosen: {best}")
        self.facts["tried"], self.facts["chosen"] = tried, vars(best)
        began = time.monotonic()
        single = texts_of(vectors, best)
        self.facts["decode_texts_per_s"] = len(single) / (time.monotonic() - began)
        shuffled = texts_of(np.roll(vectors, 1, axis=0), best)
        plain = texts_of(vectors, DecodeOptions(steps=8))
        self.say("decoded in one pass")
        self.facts["texts"] = {
            "reference": references,
            "single_pass": single,
            "single_pass_8_steps": plain,
            "shuffled": shuffled,
        }
        self.facts["embedded"] = {"single_pass": compare_vectors(encoder.encode(single), vectors)}
        self.save()
        score(self.file)
        began, rounds, candidates = time.monotonic(), 2 if own.tiny else own.rounds, 2 if own.tiny else 16
        pace: list[float] = []

        def after_round(number: int, total: int, near: float) -> None:
            pace.append(time.monotonic() - began)
            self.say(f"round {number}/{total}: cosine {near:.4f}")

        def keep(found: Decoded) -> bool:
            """Save the texts so far, and return whether there is time for one more round."""
            corrected = trained.vocabulary.decode_batch(found.tokens)
            self.facts["correction"] = {"rounds": len(pace), "seconds": time.monotonic() - began}
            self.facts["embedded"]["corrected"] = compare_vectors(encoder.encode(corrected), vectors)
            self.facts["texts"]["corrected"] = corrected
            self.save()
            return self.left_s() > 3 * pace[-1] / len(pace)

        decode_and_correct(
            trained.sampler,
            encoder,
            trained.vocabulary,
            vectors,
            options=best,
            correct=CorrectOptions(rounds=rounds, candidates=candidates),
            max_tokens=trained.settings.max_tokens,
            on_round=after_round,
            goes_on=keep,
        )
        score(self.file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--file", type=Path, help="a copy of the WordNet package")
    running = commands.add_parser("run")
    running.add_argument("--carry", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--work", type=Path, default=Path("/tmp/latent_text"))
    running.add_argument("--budget_s", type=float, default=560.0, help="for everything (default 560)")
    running.add_argument("--decode_s", type=float, default=60.0, help="of it, for decoding (default 60)")
    running.add_argument("--steps", type=int, default=0, help="train so many steps, whatever the time")
    running.add_argument("--crops", type=int, default=3, help="spans of each text as more texts (default 3)")
    running.add_argument("--max_texts", type=int, default=-1, help="use so many of the texts")
    running.add_argument("--rounds", type=int, default=12, help="most rounds of correction (default 12)")
    running.add_argument(
        "--probe", action="store_true", help="only measure the time of a step, to compare what --set changes"
    )
    running.add_argument(
        "--decode_only", action="store_true", help="use the pairs and the model that are in --work"
    )
    running.add_argument("--tiny", action="store_true")
    running.add_argument(
        "--set", nargs=2, action="append", metavar=("OPTION", "JSON"), help="change an option"
    )
    scoring = commands.add_parser("score")
    scoring.add_argument("file", type=Path)
    own = parser.parse_args()
    if own.command == "pack":
        pack(own.out, file=own.file)
    elif own.command == "score":
        score(own.file)
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # half a million texts are tokenized twice
        Bench(own).run()


if __name__ == "__main__":
    sys.exit(main())
