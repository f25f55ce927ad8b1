"""Intact run folders for the cases of hostile_runs.py, each made when it is first needed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from crosstune.cli.main import main
from crosstune.files.journal import Journal
from injection.intact_files import FIXED, Workshop

JUDGED = [{"task": f"Add {n} and {n}.", "answer": str(2 * n), "score": n % 11} for n in range(40)]


def profiled_run(shop: Workshop) -> Path:
    """Train with evaluation, samples, checkpoints and a profile."""

    def make(folder: Path) -> None:
        words = ["--model_name", str(shop.good / "model"), "--dataset", str(shop.good / "data.jsonl")]
        words += ["--output_dir", str(folder.parent), "--name", folder.name, "--lora_rank", "2"]
        words += ["--max_steps", "2", "--save_steps", "1", "--eval_steps", "1", "--train_type", "lora"]
        assert main(["train", *FIXED, *words, "--profile", "true", "--profile_export_trace", "false"]) == 0

    return shop.made("profiled", make)


def judge_folder(shop: Workshop) -> Path:
    def make(folder: Path) -> None:
        data = folder.parent / "judged.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in JUDGED))
        answers = [{"task": row["task"], "answer": row["answer"]} for row in JUDGED[:20]]
        (folder.parent / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
        words = ["--model_name", str(shop.good / "model"), "--dataset", str(data), "--train_type", "lora"]
        words += ["--output_dir", str(folder.parent), "--name", folder.name, "--max_steps", "1"]
        assert main(["judge", "train", *FIXED, *words, "--context_length", "512"]) == 0

    return shop.made("judge", make)


def ladder_words(shop: Workshop, folder: Path) -> list[str]:
    words = ["--model_name", str(shop.good / "model"), "--dataset", str(shop.good / "data.jsonl")]
    words += ["--output_dir", str(folder.parent), "--name", folder.name, "--steps", "3"]
    return [
        "ladder",
        *("--backend", "cpu", "--precision", "fp32", "--lora_rank", "2", "--rungs", "cosine_latent_loss"),
        *words,
    ]


def ladder_folder(shop: Workshop) -> Path:
    def make(folder: Path) -> None:
        assert main(ladder_words(shop, folder)) == 0

    return shop.made("ladder", make)


def latent_folder(shop: Workshop) -> Path:
    def make(folder: Path) -> None:
        words = ["latents", "build", "grammar", "--max_texts", "60", "--max_tokens", "12"]
        assert main([*words, "--out", str(folder / "pairs")]) == 0
        words = ["train", "--recipe", "latent_diffusion", "--dataset", str(folder / "pairs"), "--skip_eval"]
        words += ["--hidden_size", "32", "--n_blocks", "1", "--backend", "cpu", "--loss_type", "random"]
        assert main([*words, "--max_steps", "1", "--output_dir", str(folder), "--name", "run"]) == 0
        dim = np.load(folder / "pairs" / "train" / "latents.npy").shape[1]
        rows = np.array([[random.Random(n).gauss(0, 1) for n in range(k, k + dim)] for k in range(5)])
        np.save(folder / "few.npy", (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))

    return shop.made("latents", make)


def generate_words(shop: Workshop, output: Path) -> list[str]:
    prompts = shop.good / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("".join(f"Say {n}\n" for n in range(6)))
    words = ["--prompt_file", str(prompts), "--max_new_tokens", "2", "--backend", "cpu", "--batch_size", "2"]
    return ["generate", str(shop.good / "adapter"), *words, "--output", str(output)]


def predict_words(shop: Workshop, run: Path, output: Path) -> list[str]:
    answers = judge_folder(shop).parent / "answers.jsonl"
    words = ["--input", str(answers), "--backend", "cpu", "--batch_size", "4", "--output", str(output)]
    return ["judge", "predict", str(run), *words]


def decode_words(shop: Workshop, vectors: Path, output: Path) -> list[str]:
    words = ["--vectors", str(vectors), "--steps", "2", "--device", "cpu", "--out", str(output)]
    return ["latents", "decode", str(latent_folder(shop) / "run"), *words]


def journal(shop: Workshop, command: str) -> Path:
    """The journal of a command that was killed before it wrote its output."""

    def make(folder: Path) -> None:
        folder.mkdir()
        words = {
            "generate": lambda: generate_words(shop, folder / "out.jsonl"),
            "predict": lambda: predict_words(shop, judge_folder(shop), folder / "out.jsonl"),
            "decode": lambda: decode_words(shop, latent_folder(shop) / "few.npy", folder / "out.jsonl"),
        }[command]()
        plain, Journal.remove = Journal.remove, lambda self: None  # type: ignore[method-assign,assignment,return-value]
        try:
            assert main(words) == 0
        finally:
            Journal.remove = plain  # type: ignore[method-assign]

    return shop.made(f"journal-{command}", make) / "out.jsonl.partial"
