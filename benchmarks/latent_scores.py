"""Read the log of a training and score decoded texts, for `latent_text.py`."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def copied_log(run: Path, out: Path, *, every_s: float = 20.0) -> Iterator[None]:
    """Copy the log of a run to the results while it is written."""
    done = threading.Event()

    def copy() -> None:
        while not done.wait(every_s):
            for name in ("metrics.jsonl", "events.jsonl"):
                if (run / name).is_file():
                    shutil.copyfile(run / name, out / name)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compare_vectors(found: Any, vectors: Any) -> dict[str, float]:
    from crosstune.recipes.latent_diffusion.evaluation import cosine, retrieval

    return {"cosine": cosine(found, vectors), "retrieval_at_1": retrieval(found, vectors)}


def score(path: Path) -> None:
    """Print the scores of the texts in a file of `run`; add them to it if sacrebleu is installed."""
    from crosstune.recipes.latent_diffusion.evaluation import exact_match, has_sacrebleu, text_scores

    facts = json.loads(path.read_text(encoding="utf-8"))
    if "texts" not in facts:
        print(json.dumps(facts["training"]["evaluations"], indent=1))
        print(f"{path} has no decoded texts: the run ended before")
        return
    texts = dict(facts["texts"])
    references = texts.pop("reference")
    scores = {
        name: text_scores(found, references)
        if has_sacrebleu()
        else {"exact_match": exact_match(found, references)}
        for name, found in texts.items()
    }
    facts["scores"] = scores
    path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    training = {
        name: value for name, value in facts["training"].items() if name not in ("curve", "evaluations")
    }
    print(
        json.dumps(
            {"scores": scores, "embedded": facts["embedded"], "training": training, "chosen": facts["chosen"]}
        )
    )
    for row in range(min(8, len(references))):
        print(
            "\n".join(
                f"  {name:<20} {found[row]}" for name, found in {"reference": references, **texts}.items()
            ),
            end="\n\n",
        )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{"step": e["step"], **e["metrics"]} for e in events if "metrics" in e and "when" in e]
