"""Disks that fill while a command writes: one disk for its output, its temporary files and the cache, or a limit on files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from crosstune.cli.main import main
from crosstune.models.tiny import tiny_model
from injection.children import Child
from injection.disks import _REMOUNT, PAGE, _mount, _own_mounts, _pages, can_mount, file_limit
from injection.kills import Trial

LARGE = 512 << 20
CPU = ("--backend", "cpu")
TRAIN = ("--backend", "cpu", "--precision", "fp32", "--skip_eval", "--num_samples", "0")


@dataclass(frozen=True)
class Writer:
    """A command that writes below OUT, a folder on the disk; words in capitals are paths of the inputs."""

    words: str
    again: str = ""
    """What is added when the command is repeated, as its error says."""
    brings: tuple[str, ...] = ()
    """Inputs that are copied onto the disk, since the command writes into them."""
    keeps: tuple[str, ...] = ()
    """Patterns of the files that a failed command may leave: finished work that the next try continues from."""


JOURNAL = ("*.partial",)
RUN = ("out/*",)
"""A run's folder stays with its log and its checkpoints, and can be resumed."""
LONG = ("ladder", "sweep", "profile")
"""They train several times, or evaluate a profile."""
LATENT = "--device cpu --steps 2"
ANSWERS = "--max_new_tokens 4 --backend cpu"
WRITERS = {
    "train": Writer("train TRAIN --model_name MODEL --dataset DATA --save_steps 1 --max_steps 2 --output_dir DISK --name out",
                    "--resume auto", keeps=RUN),
    "train with samples": Writer("train --model_name MODEL --dataset DATA --backend cpu --eval_steps 1 --max_steps 2 "
                                 "--eval_samples 4 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "profile": Writer("train TRAIN --model_name MODEL --dataset DATA --max_steps 4 --profile true --output_dir DISK --name out "
                      "--profile_wait_steps 0 --profiler_warmup_steps 1 --profile_active_steps 2", "--resume auto", keeps=RUN),
    "preference": Writer("train --recipe preference TRAIN --model_name MODEL --dataset PAIRS --reference precomputed "
                         "--max_steps 1 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "rl": Writer("train --recipe rl TRAIN --model_name MODEL --dataset DATA --reward length:0-4 --num_generations 2 "
                 "--max_new_tokens 4 --save_steps 1 --max_steps 2 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "distill": Writer("train --recipe distill TRAIN --model_name MODEL --dataset DATA --teacher TEACHER --teacher_top_k 4 "
                      "--max_steps 1 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "judge train": Writer("judge train --backend cpu --model_name MODEL --dataset JUDGED --max_steps 1 --eval_samples 4 "
                          "--context_length 256 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "latent train": Writer("train --recipe latent_diffusion TRAIN --dataset LATENTS/pairs --hidden_size 32 --n_blocks 1 "
                           "--max_steps 1 --output_dir DISK --name out", "--resume auto", keeps=RUN),
    "resume": Writer("train --resume DISK/run --max_steps 3", brings=("run",), keeps=("run/*",)),
    "merge": Writer("merge ADAPTER --backend cpu --out OUT"),
    "export hf": Writer("export ADAPTER --to hf --backend cpu --out OUT"),
    "export mlx": Writer("export ADAPTER --to mlx --backend cpu --out OUT"),
    "export gguf": Writer("export ADAPTER --to gguf --gguf_type f16 --backend cpu --out OUT"),
    "export gguf q8_0": Writer("export MODEL --to gguf --gguf_type q8_0 --backend cpu --out OUT"),
    "export adapter": Writer("export ADAPTER --to gguf --adapter_only --backend cpu --out OUT"),
    "export ollama": Writer("export ADAPTER --to ollama --backend cpu --out OUT"),
    "export vllm": Writer("export ADAPTER --to vllm --backend cpu --out OUT"),
    "convert hqq": Writer("convert MODEL --to hqq --n_bits 4 --backend cpu --out OUT"),
    "convert bnb": Writer("convert MODEL --to bnb --backend cpu --out OUT"),
    "convert quanto": Writer("convert MODEL --to quanto --backend cpu --out OUT"),
    "convert mlx": Writer("convert MODEL --to mlx --backend cpu --out OUT"),
    "convert adapter": Writer("convert ADAPTER --to mlx --out OUT"),
    "report": Writer("report DISK/run", brings=("run",), keeps=("run/*",)),
    "compare": Writer("compare RUN ADAPTER_RUN --out OUT.html"),
    "generate": Writer(f"generate MODEL --prompt_file PROMPTS {ANSWERS} --output OUT", keeps=JOURNAL),
    "pairs make": Writer(f"pairs make MODEL --prompts PROMPTS --judge JUDGE:short --num 2 {ANSWERS} --out OUT", keeps=JOURNAL),
    "pairs check": Writer("pairs check PAIRS --judge JUDGE:short --out OUT", keeps=JOURNAL),
    "judge predict": Writer("judge predict MODEL --input ITEMS --backend cpu --output OUT", keeps=JOURNAL),
    "judge eval": Writer("judge eval MODEL --dataset JUDGED --backend cpu --skip_untrained --out OUT",
                         keeps=JOURNAL),
    "judge data": Writer("judge data JUDGED --split_to OUT"),
    "eval": Writer("eval DISK/run --tasks TASK --backend cpu --limit 2", brings=("run",), keeps=("run/*",)),
    "latents build": Writer("latents build grammar --max_texts 60 --max_tokens 12 --out OUT"),
    "latents export": Writer("latents export LATENTS/pairs --layout shards --out OUT"),
    "latents decode": Writer(f"latents decode LATENTS/run --vectors LATENTS/few.npy {LATENT} --out OUT", keeps=JOURNAL),
    "latents encode": Writer(f"latents encode LATENTS/run --text the_cat {LATENT} --out OUT"),
    "latents sample": Writer(f"latents sample LATENTS/run --samples 3 {LATENT} --out OUT"),
    "latents eval": Writer(f"latents eval DISK/latent --data LATENTS/pairs --samples 4 {LATENT}", brings=("latent",),
                           keeps=("latent/*",)),
    "move": Writer("move RUN --to cpu --out OUT.tar"),
    "continue archive": Writer("train --resume ARCHIVE --max_steps 3 --output_dir DISK", keeps=("*/*",)),
    "checkpoint export": Writer("checkpoint export RUN --out OUT"),
    "checkpoint import": Writer("checkpoint import SAVED --model_name MODEL --train_type full --backend cpu --out OUT"),
    "push": Writer("push RUN --to org/name --base org/base --dry_run --out OUT"),
    "push merged": Writer("push RUN --to org/name --base org/base --what merged --dry_run --out OUT"),
    "import": Writer("import OTHER --out OUT.yaml"),
    "adopt": Writer("adopt OUT"),
    "launch": Writer("launch --on slurm --nnodes 1 --print --output OUT.sh"),
    "sweep": Writer("sweep --over lr=1e-4,1e-3 --backend cpu --num_samples 0 --model_name MODEL --dataset DATA --eval_samples 2 --max_steps 1 "
                    "--output_dir DISK --name out", keeps=RUN),
    "ladder": Writer("ladder --backend cpu --model_name MODEL --dataset DATA --steps 3 --rungs cosine_latent_loss "
                     "--output_dir DISK --name out", keeps=RUN),
}  # fmt: skip


@dataclass
class Inputs:
    """Intact inputs of every writer, made once, on a disk that does not fill."""

    home: Path
    mounts: bool = True
    """False where a process may not mount a disk of its own; then only the size of files can be limited."""

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.disk = self.home / "disk"
        self.places = self._make_places()

    def _make_places(self) -> dict[str, str]:
        home = self.home
        tiny_model(home / "model")
        tiny_model(home / "teacher", seed=1)
        rows = [{"prompt": f"Say {n}", "completion": f"{n} and {n}"} for n in range(16)]
        _write_rows(home / "data.jsonl", rows)
        pairs = [{"prompt": f"Say {n}.", "chosen": "yes, it is", "rejected": "no"} for n in range(12)]
        _write_rows(home / "pairs.jsonl", pairs)
        judged = [{"task": f"Add {n} and {n}.", "answer": str(2 * n), "score": n % 11} for n in range(40)]
        _write_rows(home / "judged.jsonl", judged)
        _write_rows(home / "items.jsonl", [{"task": row["task"], "answer": row["answer"]} for row in judged])
        (home / "prompts.txt").write_text("".join(f"Say {n}.\n" for n in range(24)))
        (home / "judge.py").write_text("def short(prompt, answer):\n    return -len(answer)\n")
        (home / "other.yml").write_text(
            "base_model: org/m\nadapter: lora\nlora_r: 8\nlearning_rate: 0.0002\n"
        )
        _write_rows(home / "rows.jsonl", [{"q": f"{n}?", "label": n % 2} for n in range(3)])
        (home / "task.yaml").write_text(TASK.replace("DATA", str(home / "rows.jsonl")))
        return {
            "MODEL": str(home / "model"), "TEACHER": str(home / "teacher"), "DATA": str(home / "data.jsonl"), "PAIRS": str(home / "pairs.jsonl"),
            "JUDGED": str(home / "judged.jsonl"), "ITEMS": str(home / "items.jsonl"), "PROMPTS": str(home / "prompts.txt"),
            "JUDGE": str(home / "judge.py"), "OTHER": str(home / "other.yml"), "TASK": str(home / "task.yaml"),
            "RUN": str(home / "run"), "ADAPTER_RUN": str(home / "other-run"), "ADAPTER": str(home / "run" / "adapter"),
            "ARCHIVE": str(home / "run.tar"), "SAVED": str(home / "saved.pt"), "LATENTS": str(home / "latents"),
            "DISK": str(self.disk), "OUT": str(self.disk / "out"), "TRAIN": " ".join(TRAIN),
        }  # fmt: skip

    def words(self, text: str) -> list[str]:
        for name in sorted(self.places, key=len, reverse=True):
            text = _replace_word(text, name, self.places[name])
        return [word.replace("the_cat", "the cat") for word in text.split()]

    def make(self, writer: Writer) -> None:
        """Make the runs and pairs that a writer reads, in a child."""
        text = writer.words + " ".join(writer.brings)
        wanted = [
            name for name in ("run", "other-run") if name in text or name.upper() in text or "ADAPTER" in text
        ]
        for name in [*wanted, *(["run"] if "ARCHIVE" in text else [])]:
            if not (self.home / name).exists():
                train = "train TRAIN --model_name MODEL --dataset DATA --train_type lora --lora_rank 4 --save_steps 1 --max_steps 2"
                self._run(self.words(f"{train} --output_dir {self.home} --name {name}"))
        if "SAVED" in text and not (self.home / "saved.pt").exists():
            state = load_file(self.home / "model" / "model.safetensors")
            torch.save({"model_state_dict": state, "step": 3}, self.home / "saved.pt")
        if "ARCHIVE" in text and not (self.home / "run.tar").exists():
            self._run(self.words(f"move RUN --to cpu --out {self.home / 'run.tar'}"))
        if ("LATENTS" in text or "latent" in writer.brings) and not (self.home / "latents").exists():
            self._run(self.words("latents build grammar --max_texts 60 --max_tokens 12 --out LATENTS/pairs"))
            words = "train --recipe latent_diffusion --dataset LATENTS/pairs --skip_eval --hidden_size 32 --n_blocks 1"
            self._run(
                self.words(
                    f"{words} --backend cpu --loss_type random --max_steps 1 --output_dir LATENTS --name run"
                )
            )
            dim = np.load(self.home / "latents/pairs/train/latents.npy").shape[1]
            few = np.random.default_rng(0).standard_normal((600, dim)).astype(np.float32)
            np.save(self.home / "latents/few.npy", few / np.linalg.norm(few, axis=1, keepdims=True))

    def _run(self, words: list[str]) -> None:
        ended = Child(partial(main, words), said=self.home).wait()
        assert ended.code == 0, (words, ended)


TASK = (
    "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: DATA}}\ntest_split: test\noutput_type: multiple_choice\n"
    'doc_to_text: "{{q}}"\ndoc_to_choice: [" a", " b"]\ndoc_to_target: "{{label}}"\n'
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
)


def measure(inputs: Inputs, name: str) -> tuple[int, int] | None:
    """Return the bytes that a command takes from the disk at most, and those of the largest file it leaves there; None if it
    needs a package that is not installed."""
    writer, verdict = WRITERS[name], inputs.home / "verdict.json"
    inputs.make(writer)
    ended = Child(partial(_measure, inputs, writer, verdict), said=inputs.home).wait()
    if ended.code == 2 and "pip install" in ended.said:
        return None
    assert ended.code == 0, (name, str(ended))
    peak, largest = json.loads(verdict.read_text())
    return peak, largest


def fill(inputs: Inputs, name: str, *, tenth: int, peak: int) -> Trial:
    """Run a command on a disk with some tenths of what it takes, then again on the same disk with room. A trial whose command
    ended with an error counts as a stop."""
    return _try(inputs, name, kind="disk", tenth=tenth, num_bytes=_pages(peak * tenth // 10))


def limit(inputs: Inputs, name: str, *, tenth: int, largest: int) -> Trial:
    """Run a command with a limit on the size of files, some tenths of its largest; then again without."""
    return _try(inputs, name, kind="limit", tenth=tenth, num_bytes=largest * tenth // 10)


def _try(inputs: Inputs, name: str, *, kind: str, tenth: int, num_bytes: int) -> Trial:
    writer, verdict = WRITERS[name], inputs.home / "verdict.json"
    verdict.unlink(missing_ok=True)
    child = Child(partial(_run_twice, inputs, writer, kind, num_bytes, verdict), said=inputs.home)
    ended = child.wait(limit_s=300.0)
    problems, has_failed = [f"nothing was looked at: {ended}"], False
    if verdict.exists():
        problems, has_failed = json.loads(verdict.read_text())
    return Trial(kind=f"{kind}: {name}", method="", seed=tenth, problems=problems, kills=int(has_failed))


def _measure(inputs: Inputs, writer: Writer, verdict: Path) -> int:
    _mounted(inputs, writer, LARGE)
    before = _used(inputs.disk)
    peaks, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peaks.append(_used(inputs.disk))
            time.sleep(0.0005)

    threading.Thread(target=watch, daemon=True).start()
    old = {path: path.stat().st_mtime_ns for path in _files(inputs.disk)}
    code = main(inputs.words(writer.words))
    ended.set()
    new = [path for path in _files(inputs.disk) if old.get(path) != path.stat().st_mtime_ns]
    largest = max((path.stat().st_size for path in new), default=0)
    verdict.write_text(json.dumps([max(*peaks, _used(inputs.disk)) - before, largest]))
    return code


def _run_twice(inputs: Inputs, writer: Writer, kind: str, num_bytes: int, verdict: Path) -> int:
    _mounted(inputs, writer, LARGE)
    if kind == "disk":
        _resize(inputs.disk, _used(inputs.disk) + max(num_bytes, 0))
    before = set(_files(inputs.disk))
    with _said() as said:
        if kind == "limit":
            with file_limit(num_bytes):
                code = main(inputs.words(writer.words))
        else:
            code = main(inputs.words(writer.words))
    text, problems = said[0], []
    after = [path.relative_to(inputs.disk) for path in _files(inputs.disk) if path not in before]
    left = [str(path) for path in after if not _may_stay(path, writer)]
    if "Traceback" in text:
        problems.append(f"a traceback: {text[-1500:]}")
    if code == 2:
        problems += [f"left behind: {', '.join(left[:5])}"] * bool(left)
        if "do:" not in text:
            problems.append(f"it does not say what to do: {text[-600:]}")
        if not any(word in text for word in ROOM):
            problems.append(f"it does not name the disk: {text[-600:]}")
        if "/." in text.replace("/.locks", "").replace("/...", ""):
            problems.append(f"a hidden name: {text[-600:]}")
    elif code != 0:
        problems.append(f"exit code {code}: {text[-1500:]}")
    if kind == "disk":
        _resize(inputs.disk, LARGE)
    has_failed = code != 0
    if has_failed:
        with _said() as said:
            code = main(inputs.words(f"{writer.words} {writer.again}"))
        if code != 0:
            problems.append(f"the next try ends with {code}: {said[0][-1200:]}")
        if hidden := [str(path) for path in _files(inputs.disk) if _is_hidden(path.relative_to(inputs.disk))]:
            problems.append(f"the next try leaves {', '.join(hidden[:5])}")
    verdict.write_text(json.dumps([problems, has_failed]))
    return 0


ROOM = ("disk", "No space left", "File too large", "space")


def _may_stay(path: Path, writer: Writer) -> bool:
    small = ("hashes", "tokenizers", "templates")  # what was found out about files, for the next command
    if ".locks" in path.parts or (path.parts[0] == "cache" and path.parts[1] in small):
        return True
    return not _is_hidden(path) and any(fnmatch(path.as_posix(), each) for each in writer.keeps)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") and part not in (".locks", ".shared") for part in path.parts)


def _mounted(inputs: Inputs, writer: Writer, num_bytes: int) -> None:
    if inputs.mounts:
        _own_mounts()
        inputs.disk.mkdir(exist_ok=True)
        _mount("tmpfs", inputs.disk, "tmpfs", 0, f"size={num_bytes}")
    else:
        shutil.rmtree(inputs.disk, ignore_errors=True)
        inputs.disk.mkdir()
    for name in writer.brings:
        source = inputs.home / ("latents/run" if name == "latent" else name)
        shutil.copytree(source, inputs.disk / name, symlinks=True)
    (inputs.disk / "ballast").write_bytes(bytes(PAGE))  # a size of 0 would be no limit
    (inputs.disk / "tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(inputs.disk / "tmp")
    os.environ["CROSSTUNE_CACHE"] = str(inputs.disk / "cache")


def _resize(disk: Path, num_bytes: int) -> None:
    _mount(None, disk, None, _REMOUNT, f"size={max(num_bytes, PAGE)}")


def _used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _files(disk: Path) -> Iterator[Path]:
    return (path for path in sorted(disk.rglob("*")) if path.is_file() or path.is_symlink())


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect standard output and error, also those of processes that the command starts; a pipe has no limit of size."""
    kept, streams = [os.dup(1), os.dup(2)], (sys.stdout, sys.stderr)
    source, target = os.pipe()
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(_read_all(source)))
    reader.start()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    try:
        yield said
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, handle in zip((1, 2), kept, strict=True):
            os.dup2(handle, number)
            os.close(handle)
        sys.stdout, sys.stderr = streams
        reader.join()


def _read_all(source: int) -> str:
    with os.fdopen(source, "rb") as file:
        return file.read().decode(errors="replace")


def _replace_word(text: str, name: str, value: str) -> str:
    """Replace a name at the beginning of a word, followed by the end of the word or by `/`, `.` or `:`."""
    return re.sub(rf"(?<!\S){name}(?=$|[\s/.:])", lambda _: value, text)


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


__all__ = ["WRITERS", "Inputs", "can_mount", "fill", "limit", "measure"]
