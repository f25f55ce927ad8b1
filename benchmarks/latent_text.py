"""Train latent diffusion on real text, WordNet's definitions and examples, and decode held-out sentence vectors.

    python benchmarks/latent_text.py pack --out .carry/latents        here: the texts, and the encoder in fp16 (50 MB)
    python benchmarks/latent_text.py run --carry .carry/latents --out OUT --prepare           on the GPU: pairs, step
    python benchmarks/latent_text.py run --carry .carry/latents --out OUT --budget_s 560      on the GPU
    python benchmarks/latent_text.py score OUT/latent_text.json       BLEU of the texts in it, with sacrebleu
    python benchmarks/latent_text.py run --carry .carry/latents --out OUT --tiny              to see that it runs

`run` ends within --budget_s seconds: it embeds the texts, measures the time of a step (with compiled blocks on a GPU, if that
works), trains through `crosstune train` until --decode_s seconds are left, chooses guidance and steps by the
BLEU of one half of the held-out texts (by their re-embedding cosine without sacrebleu), and reports the other half: one
pass, the same with shuffled vectors, and decoding by correction until the time is over. It writes latent_text.json
after training, after one pass and after each round of correction, and copies the training log next to it during the run, so
that an interrupted run loses little.

With --prepare, it ends after the first two of these, which also fills torch's cache of compiled blocks. A later `run` with
the same --work reuses the pairs, if they would be the same, and the time of a step, if it was measured with
the same settings on the same kind of machine. To compare the steps of several settings, call --prepare with each --set.
With --decode_only, it decodes with the model that is in --work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from latent_decode import Decoding
from latent_scores import copied_log, read_evaluations, read_metrics, score

from crosstune.files.atomic_files import write_text
from crosstune.files.json_files import read_json, write_json
from crosstune.files.plain_files import UnreadableFile

HELD_OUT = 2000
AVERAGED_SHARE = 0.025
"""The average of the weights is over about this share of the steps: a longer one lags behind."""
OVERHEAD_S = 15.0
"""For evaluations, and for writing the model."""
SLOWER = 1.16
"""Steps of a long training against those measured before: a card that is limited by power slows down."""
START_S = 10.0
"""For the first steps of a process that finds its compiled blocks on the disk."""
SAY_EVERY_S = 5.0
_NOT_ASKED = ("texts", "edition", "encoder")
"""What tells two builds apart and is no field of a build's request."""
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

    from crosstune.recipes.latent_diffusion.corpora import fetch_wordnet, read_wordnet
    from crosstune.recipes.latent_diffusion.encoders import MINILM, find_encoder

    encoder = out / "encoder"
    out.mkdir(parents=True, exist_ok=True)
    source = find_encoder(MINILM)
    shutil.copytree(source, encoder, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    halves = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in weights.items()}
    save_file(halves, encoder / "model.safetensors", metadata={"format": "pt"})
    texts = read_wordnet(fetch_wordnet(file=file))
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
        self.start_s = 0.0
        self.facts: dict[str, Any] = {
            "settings": self.settings,
            "budget_s": own.budget_s,
            "decode_s": own.decode_s,
        }

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        return self.own.budget_s - (time.monotonic() - self.started)

    def run(self) -> None:
        own = self.own
        own.out.mkdir(parents=True, exist_ok=True)
        self.file = own.out / "latent_text.json"
        kept = own.work / "facts.json"
        if own.decode_only:
            self.facts = json.loads(kept.read_text(encoding="utf-8"))
        else:
            step_s = self.prepare()
            if own.prepare:
                return
            with copied_log(own.work / "runs" / "text", own.out):
                self.say(f"trained {self.train(step_s)} steps")
            write_text(kept, json.dumps(self.facts))
            self.save()
        Decoding(
            run=own.work / "runs" / "text",
            pairs=own.work / "pairs",
            encoder_folder=own.carry / "encoder",
            facts=self.facts,
            file=self.file,
            save=self.save,
            say=self.say,
            left_s=self.left_s,
            rounds=2 if own.tiny else own.rounds,
            candidates=2 if own.tiny else 16,
        ).decode()

    def save(self) -> None:
        """Write the results so far, so that an interrupted run loses little."""
        write_text(self.file, json.dumps(self.facts, indent=1))

    def prepare(self) -> float:
        """Return the seconds of a step; reuse the pairs and the step of an earlier call if they are the same."""
        import torch

        known = self._read_known(self.own.work / "prepared.json")
        request = self._data_request()
        if known.get("request") == request and known.get("manifest") == self._manifest_sha256():
            self.say(f"took over the pairs in {self.own.work}: {known['data']['splits']}")
        else:
            data = self.build(request)
            known |= {"request": request, "manifest": self._manifest_sha256(), "data": data}
            self._keep(known)
        self.facts |= {"request": request, "data": known["data"]}
        on = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        key = {"asked": self.settings, "on": on, "torch": torch.__version__, "manifest": known["manifest"]}
        measured = [item for item in known.get("measured", ()) if key.items() <= item.items()]
        if measured and not self.own.prepare:
            self.facts |= measured[-1]["facts"]
            self.settings = self.facts["settings"]
            self.start_s = START_S if self.settings["torch_compile"] else 0.0
            self.say(f"took over the step measured before: {1000 * self.facts['probe']['step_s']:.1f} ms")
        else:
            self.measure_step()
            facts = {name: self.facts[name] for name in ("settings", "probe", "failed") if name in self.facts}
            known["measured"] = [*known.get("measured", ()), {**key, "facts": facts}]
            self._keep(known)
        return float(self.facts["probe"]["step_s"])

    def _read_known(self, path: Path) -> dict[str, Any]:
        """Return the preparation of an earlier call; nothing, with a message, if its file is truncated."""
        try:
            return read_json(path)
        except UnreadableFile as error:
            self.say(f"nothing is taken over from {path}: {error.why}")
            return {}

    def _keep(self, known: dict[str, Any]) -> None:
        for folder in (self.own.work, self.own.out):
            write_json(folder / "prepared.json", known)

    def _manifest_sha256(self) -> str:
        path = self.own.work / "pairs" / "manifest.json"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    def _data_request(self) -> dict[str, Any]:
        """Return the identity of a build, independent of the location of its files."""
        from crosstune.recipes.latent_diffusion.encoders import encoder_record
        from crosstune.recipes.latent_diffusion.texts import EDITION

        own = self.own
        return {
            "texts": hashlib.sha256((own.carry / "texts.txt").read_bytes()).hexdigest(),
            "edition": EDITION,
            "encoder": encoder_record("", own.carry / "encoder")["sha256"],
            "max_texts": 200 if own.tiny else own.max_texts,
            "crops": min(1, own.crops) if own.tiny else own.crops,
            "mixes": min(1, own.mixes) if own.tiny else own.mixes,
            "validation_share": 0.25 if own.tiny else 0.05,
            "max_validation": HELD_OUT,
        }

    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the pairs; return their manifest without the list of files, and the time it took."""
        from crosstune.recipes.latent_diffusion.build import BuildRequest, build
        from crosstune.recipes.latent_diffusion.texts import WriteOptions

        own = self.own
        began, said = time.monotonic(), 0.0

        def on_text(stage: str, done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                self.say(f"{stage}: {done:,} of {total:,} texts")

        manifest = build(
            BuildRequest(
                source=str(own.carry / "texts.txt"),
                out=own.work / "pairs",
                encoder=str(own.carry / "encoder"),
                options=WriteOptions(max_tokens=24, too_long="drop", dtype="fp16"),
                on_text=on_text,
                **{name: value for name, value in request.items() if name not in _NOT_ASKED},
            )
        )
        del manifest["files"]
        seconds = time.monotonic() - began
        self.say(f"pairs: {manifest['splits']}, in {seconds:.1f} s")
        return manifest | {"seconds": seconds}

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

    def measure_step(self) -> None:
        """Measure the seconds of a step. Where compiled blocks fail, try them with plain attention, then none; say so."""
        from crosstune.core.errors import UserError

        ways: list[dict[str, Any]] = [{}]
        if self.settings["torch_compile"]:
            ways += [{"use_flash_attention": False}, {"torch_compile": False}]
        before = self.settings
        for number, way in enumerate(ways, start=1):
            self.settings = before | way
            try:
                self.facts["probe"] = self._measure_step()
                self.facts["settings"] = self.settings
                return
            except (UserError, RuntimeError) as error:  # torch's compiler raises both
                if number == len(ways):
                    raise
                why = f"{error} {getattr(error, 'why', '')}".strip()
                self.say(f"a training with {way or 'these settings'} fails: {why}")
                self.facts.setdefault("failed", []).append({"settings": self.settings, "error": why})

    def _measure_step(self) -> dict[str, float]:
        """Train a few steps, which also compile the blocks for the long training."""
        import crosstune

        began, steps = time.monotonic(), 6 if self.own.tiny else 30
        run = crosstune.train(
            **self._options(), name="probe", max_steps=steps, skip_eval=True, save_model=False
        )
        times = [row["step_s"] for row in read_metrics(run.folder)]
        step_s, seconds = float(np.median(times[steps // 2 :])), time.monotonic() - began
        rate = self.settings["batch_size"] / step_s
        self.say(
            f"a step takes {1000 * step_s:.1f} ms, {rate:,.0f} samples/s; the probe took {seconds:.1f} s"
        )
        return {"step_s": step_s, "first_step_s": times[0], "seconds": seconds}

    def train(self, step_s: float) -> int:
        import crosstune

        own = self.own
        seconds = self.left_s() - own.decode_s - OVERHEAD_S - self.start_s
        steps = own.steps or (40 if own.tiny else max(500, int(seconds / (SLOWER * step_s))))
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
            "steps": len(rows),
            "steps_planned": steps,
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
        return len(rows)


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
    running.add_argument("--decode_s", type=float, default=75.0, help="of it, for decoding (default 75)")
    running.add_argument("--steps", type=int, default=0, help="train so many steps, whatever the time")
    running.add_argument("--crops", type=int, default=8, help="spans of each text as more texts (default 8)")
    running.add_argument(
        "--mixes", type=int, default=6, help="texts of each text and another as more texts (default 6)"
    )
    running.add_argument("--max_texts", type=int, default=-1, help="use so many of the texts")
    running.add_argument("--rounds", type=int, default=12, help="most rounds of correction (default 12)")
    running.add_argument(
        "--prepare", action="store_true", help="only build the pairs and measure the time of a step"
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
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # millions of texts are tokenized
        Bench(own).run()


if __name__ == "__main__":
    sys.exit(main())
