"""Measure the gains of the ladder for latent diffusion, from the initial settings of the optimization guide.

    python benchmarks/latent_ladder.py --carry .carry/latents --out OUT --budget_s 420      on a GPU
    python benchmarks/latent_ladder.py --out OUT --tiny                                     to see that it runs

It packs texts into rows of 200 to 256 tokens, trains a few steps to measure the time of a trial, and runs `crosstune
ladder` for speed, and then for memory, with as many rungs as fit into the time; the result lists the omitted rungs. With
--rungs, all listed rungs are tried. A second call with the same --work continues a call that ran out of time.

The baseline: hidden size 1024, 24 blocks, one latent token, 4 rows and two micro-batches a step, bf16 compute, attention
that stores its scores, no gradient checkpointing. Differences from the guide's code: crosstune's adamw is already fused on
a GPU and its batches are prepared in a thread, and neither can be turned off; no dropout, since its random numbers would
differ between micro-batches of different sizes, and losses could not be compared; --loss_type l2t has no latent loss. With
--carry (written by `latent_text.py pack`) the texts, vectors and vocabulary are real; otherwise they are from the grammar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FULL = {"hidden_size": 1024, "n_blocks": 24}
TINY = {"hidden_size": 64, "n_blocks": 2}
OLD = {
    "recipe": "latent_diffusion",
    "loss_type": "l2t",
    "latent_tokens": 1,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw",
    "use_flash_attention": False,
    "use_gradient_checkpointing": False,
    "dropout": 0.0,
    "lr": 5e-5,
    "wd": 0.01,
    "grad_norm": 0.5,
    "warmup_steps": 10,
}
RUNGS = {
    "speed": ("fast_layers", "larger_batch", "attention"),
    "memory": ("gradient_checkpointing", "optimizer_8bit"),
}
TURNS = 4
"""Trials of a rung, and of both ends."""
COMPILE_S = 60.0
"""What the first compiled trial takes longer, and each further one a third of it, since the programs are on disk."""
MARGIN = 1.05
SAVES = 3
"""Checkpoints of the trial that ends a ladder."""
SAVED_BYTES_PER_S = 0.7e9
"""A guess at how fast those are written, with their hashes."""


def pack_rows(lines: Sequence[str], lengths: Sequence[int], *, most_tokens: int, count: int) -> list[str]:
    """Return texts of several lines each, of at most `most_tokens`."""
    rows: list[str] = []
    row: list[str] = []
    used = 0
    for line, length in zip(lines, lengths, strict=True):
        if used + length > most_tokens:
            rows.append(" ".join(row))
            row, used = [], 0
            if len(rows) == count:
                break
        row.append(line)
        used += length
    return rows


def make_pairs(out: Path, *, carry: Path | None, most_tokens: int, count: int) -> dict[str, Any]:
    """Write a folder of packed texts and their vectors; return its manifest without the files."""
    from crosstune.data.tokens.tokenizer import Tokenizer
    from crosstune.recipes.latent_diffusion.corpora import (
        GRAMMAR,
        make_grammar_texts,
        write_grammar_tokenizer,
    )
    from crosstune.recipes.latent_diffusion.encoders import open_encoder
    from crosstune.recipes.latent_diffusion.pair_folder import write_pairs
    from crosstune.recipes.latent_diffusion.texts import WriteOptions, choose_rows, clean, divide
    from crosstune.recipes.latent_diffusion.vocabulary import tokenize

    with tempfile.TemporaryDirectory() as scratch:
        if carry is None:
            folder, lines = Path(scratch), make_grammar_texts()
            write_grammar_tokenizer(folder)
            encoder = open_encoder(GRAMMAR)
        else:
            folder = carry / "encoder"
            lines = [clean(line) for line in (carry / "texts.txt").read_text(encoding="utf-8").splitlines()]
            encoder = open_encoder(str(folder))
        lines = [line for line in lines[: 40 * count] if line]
        tokenizer = Tokenizer.from_folder(folder)
        lengths = tokenize(tokenizer, lines).lengths.tolist()
        short = [(line, n) for line, n in zip(lines, lengths, strict=True) if n <= most_tokens // 5]
        texts = pack_rows(
            [one for one, _ in short], [n for _, n in short], most_tokens=most_tokens, count=count
        )
        options = WriteOptions(max_tokens=most_tokens, too_long="drop")
        divided = divide(texts, validation_share=0.02, max_validation=16)
        written = write_pairs(
            out,
            texts,
            encoder.encode(texts),
            chosen=choose_rows(tokenize(tokenizer, texts), divided, tokenizer=tokenizer, options=options),
            tokenizer_folder=folder,
            encoder=encoder.record(),
            options=options,
            source="packed texts",
        )
    return {name: value for name, value in written.items() if name != "files"}


class Bench:
    def __init__(self, own: argparse.Namespace) -> None:
        self.own, self.started = own, time.monotonic()
        self.facts: dict[str, Any] = {"not_tried": {}}
        self.options = OLD | (TINY if own.tiny else FULL) | {"dataset": str(own.work / "pairs")}
        self.options |= {"precision": "fp32" if own.tiny else "bf16_autocast", "output_dir": str(own.work)}
        self.options |= {name: json.loads(value) for name, value in own.set or ()}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        return float(self.own.budget_s - (time.monotonic() - self.started))

    def run(self) -> None:
        own = self.own
        own.out.mkdir(parents=True, exist_ok=True)
        own.work.mkdir(parents=True, exist_ok=True)
        pairs, kept = own.work / "pairs", own.work / "facts.json"
        if kept.is_file() and pairs.is_dir():
            self.facts = json.loads(kept.read_text(encoding="utf-8"))
            self.options = self.facts["options"]
        else:
            size = 48 if own.tiny else 256
            self.facts["data"] = make_pairs(
                pairs, carry=own.carry, most_tokens=size, count=80 if own.tiny else 1500
            )
            self.say(
                f"pairs: {self.facts['data']['splits']}, {self.facts['data']['vocabulary']:,} tokens known"
            )
            self.fit_disk()
            # With given rungs, the time of a trial does not matter.
            trial_s = None if own.rungs else self.time_trial()
            self.facts |= {"options": self.options, "steps": own.steps, "trial_s": trial_s}
            kept.write_text(json.dumps(self.facts), encoding="utf-8")
        for goal in own.goals.split(","):
            self.climb(goal)
            (own.out / "latent_ladder.json").write_text(json.dumps(self.facts, indent=1), encoding="utf-8")

    def fit_disk(self) -> None:
        """Halve the blocks until the checkpoints fit on the disk: weights and two moments in fp32, and one being written."""
        from crosstune.config.load import make_config
        from crosstune.recipes.latent_diffusion.settings import make_settings

        data, free = self.facts["data"], shutil.disk_usage(self.own.work).free
        while True:
            settings = make_settings(
                make_config(**self.options),
                vocabulary=data["vocabulary"],
                max_tokens=data["max_tokens"],
                latent_dim=data["dim"],
            )
            self.facts["parameters"] = settings.num_parameters()
            need = 12 * self.facts["parameters"] * (SAVES + 1)
            if need < 0.9 * free or self.options["n_blocks"] < 2:
                break
            self.options["n_blocks"] //= 2
            self.say(
                f"{need / 1e9:.0f} GB of checkpoints do not fit: {self.options['n_blocks']} blocks instead"
            )
        self.say(f"{self.facts['parameters'] / 1e6:,.0f}M parameters, {free / 1e9:.0f} GB of disk free")

    def time_trial(self) -> float:
        """Return the seconds of a trial of the baseline."""
        began = time.monotonic()
        words = [*self._words(), "--name", "probe", "--max_steps", str(self.own.steps)]
        words += [
            "--skip_eval",
            "true",
            "--save_model",
            "false",
            "--save_minutes",
            "0",
            "--overwrite",
            "true",
        ]
        subprocess.run([sys.executable, "-m", "crosstune", "train", *words], check=True)
        self.say(f"a trial takes {time.monotonic() - began:.1f} s")
        return time.monotonic() - began

    def _words(self) -> list[str]:
        return [
            word
            for name, value in self.options.items()
            for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
        ]

    def choose_rungs(self, goal: str) -> list[str]:
        """Return the rungs that fit into the time; a continued call keeps its earlier choice."""
        if self.own.rungs:
            return list(self.own.rungs.split(","))
        if chosen := self.facts.setdefault("rungs", {}).get(goal):
            return list(chosen)
        trial_s = MARGIN * self.facts["trial_s"]
        saving_s = 12 * self.facts["parameters"] * SAVES / SAVED_BYTES_PER_S
        spent, chosen = (2 + TURNS) * trial_s + saving_s, []  # the baseline, a validation, and both ends
        for rung in RUNGS[goal]:
            # Two trials of the rung, two of the ends and the validation are with it.
            more = COMPILE_S * (1 + 4 / 3) if rung == "compile" and not self.own.tiny else 0.0
            if spent + TURNS * trial_s + more <= self.left_s():
                spent += TURNS * trial_s + more
                chosen.append(rung)
        self.facts["rungs"][goal] = chosen
        (self.own.work / "facts.json").write_text(json.dumps(self.facts), encoding="utf-8")
        return list(chosen)

    def climb(self, goal: str) -> None:
        """Run the ladder for a goal, and keep its table, its page and its measurements."""
        own, rungs = self.own, self.choose_rungs(goal)
        wanted = own.rungs.split(",") if own.rungs else RUNGS[goal]
        self.facts["not_tried"][goal] = [rung for rung in wanted if rung not in rungs]
        if self.facts["not_tried"][goal]:
            self.say(f"{goal}: no time for {', '.join(self.facts['not_tried'][goal])}")
        if not rungs:
            return
        folder = own.work / f"ladder-{goal}"
        words = [*self._words(), "--name", folder.name, "--goal", goal, "--rungs", ",".join(rungs)]
        command = [sys.executable, "-m", "crosstune", "ladder", *words, "--steps", str(own.steps)]
        self.say(f"{goal}: {', '.join(rungs)}")
        with (own.out / f"{folder.name}.txt").open("w", encoding="utf-8") as table:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert child.stdout is not None
            for line in child.stdout:
                print(f"[{time.monotonic() - self.started:6.1f} s] {line}", end="", flush=True)
                table.write(line)
                table.flush()
                if self.left_s() < 0:
                    child.terminate()  # measurements are kept, and a second call continues from them
            child.wait()
        found = folder / "ladder.json"
        if found.is_file():
            self.facts[goal] = json.loads(found.read_text(encoding="utf-8"))
            for page in folder.glob("*.html"):
                shutil.copyfile(page, own.out / f"{folder.name}-{page.name}")
        else:
            self.say(f"{goal}: the ladder exited with code {child.returncode} before it finished")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--carry", type=Path, help="texts and encoder that `latent_text.py pack` wrote")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "latent_ladder")
    parser.add_argument("--budget_s", type=float, default=420.0, help="for everything (default 420)")
    parser.add_argument("--steps", type=int, default=24, help="steps of each trial (default 24)")
    parser.add_argument("--goals", default="speed,memory", help="goals, in this order (default speed,memory)")
    parser.add_argument("--rungs", help="try these, whatever the time; with commas between them")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--set", nargs=2, action="append", metavar=("OPTION", "JSON"), help="change an option"
    )
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
