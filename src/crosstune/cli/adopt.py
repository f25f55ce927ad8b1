"""`crosstune adopt`: write entry scripts at the original paths, so that old commands keep working."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.cli.arguments import Parser, print_result, read_path
from crosstune.core.errors import UserError

EXAMPLES = """examples:
  crosstune adopt .
  crosstune adopt my-project --force"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A script at an original path, and the command that it runs."""

    path: str
    """Relative to the project folder."""
    about: str
    command: tuple[str, ...]
    backends: tuple[str, ...] = ()
    """Defaults of --backend: the first available on this machine."""
    output_dir: str | None = None
    """Default of --output_dir. The run is named after its model, and its result is copied to NAME_final, the folder that
    the original workflow moves to a different machine and loads with PEFT."""
    script: str = ""
    """The file contents, if not the usual Python script."""

    @property
    def name(self) -> str:
        return Path(self.path).stem


_L2T_SCRIPT = r"""#!/usr/bin/env bash
# Train latent diffusion with crosstune. Set any variable from outside, as in
#   NNODES=1 NPROC_PER_NODE=2 L2T_BASE_STEPS=100 L2T_TRAIN_BS=4 bash scripts/training/train_qwen_english_l2t_stable.sh
set -euo pipefail

NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
NPROC_PER_NODE="${NPROC_PER_NODE:-1}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
WORLD=$((NNODES * NPROC_PER_NODE))
BASE_WORLD_SIZE="${BASE_WORLD_SIZE:-$WORLD}"

L2T_CONFIG="${L2T_CONFIG:-latentDLM_mmdit/configs/mmdit_stable.yaml}"
L2T_BASE_STEPS="${L2T_BASE_STEPS:-1000000}"
L2T_BASE_SAVE_FREQ="${L2T_BASE_SAVE_FREQ:-50000}"
L2T_BASE_LOG_FREQ="${L2T_BASE_LOG_FREQ:-10}"
L2T_BASE_EVAL_FREQ="${L2T_BASE_EVAL_FREQ:-10000}"

# Scale a number of steps for BASE_WORLD_SIZE devices to the devices in use.
scaled() { echo $((($1 * BASE_WORLD_SIZE + WORLD - 1) / WORLD)); }

FLAGS=(--recipe latent_diffusion --loss_type l2t --log_to stdout)
if [ -f "$L2T_CONFIG" ]; then FLAGS+=(--config "$L2T_CONFIG"); fi
FLAGS+=(--max_steps "$(scaled "$L2T_BASE_STEPS")")
FLAGS+=(--save_steps "$(scaled "$L2T_BASE_SAVE_FREQ")")
FLAGS+=(--log_every_n_steps "$(scaled "$L2T_BASE_LOG_FREQ")")
FLAGS+=(--eval_steps "$(scaled "$L2T_BASE_EVAL_FREQ")")
FLAGS+=(--batch_size "${L2T_TRAIN_BS:-4}")
FLAGS+=(--output_dir "${L2T_SAVE_DIR:-runs}")
FLAGS+=(--name "${L2T_RUN_NAME:-l2t-$(date +%Y%m%d-%H%M%S)}")
if [ -n "${GRAD_ACCUM_STEPS:-}" ]; then FLAGS+=(--gradient_accumulation_steps "$GRAD_ACCUM_STEPS"); fi
if [ -n "${LEARNING_RATE:-}" ]; then FLAGS+=(--lr "$LEARNING_RATE"); fi
if [ -n "${GRAD_CLIP_NORM:-}" ]; then FLAGS+=(--grad_norm "$GRAD_CLIP_NORM"); fi
if [ -n "${WARMUP_STEPS:-}" ]; then FLAGS+=(--warmup_steps "$WARMUP_STEPS"); fi
if [ -n "${LATENT_LOSS_WEIGHT:-}" ]; then FLAGS+=(--latent_loss_weight "$LATENT_LOSS_WEIGHT"); fi
if [ -n "${LATENT_DIM:-}" ]; then FLAGS+=(--latent_dim "$LATENT_DIM"); fi
if [ -n "${DTYPE:-}" ]; then FLAGS+=(--precision "$DTYPE"); fi
if [ -n "${DATA_WORKERS:-}" ]; then echo "DATA_WORKERS=$DATA_WORKERS: a thread prepares batches ahead; no workers are needed"; fi
if [ "${L2T_COMPILE:-0}" != 0 ]; then FLAGS+=(--torch_compile true); fi
if [ "$WORLD" -gt 1 ]; then FLAGS+=(--world_size "$WORLD"); fi

# Import the original token and latent files once; without them, use L2T_PAIRS or generated sentences.
PAIRS="${L2T_PAIRS:-}"
if [ -z "$PAIRS" ] && [ -n "${TOKEN_DIR:-}" ] && [ -n "${LATENT_DIR:-}" ]; then
  PAIRS="$(dirname "$TOKEN_DIR")/crosstune-pairs"
  if [ ! -f "$PAIRS/manifest.json" ]; then
    "${PYTHON:-python}" -m crosstune latents build "$(dirname "$TOKEN_DIR")" --out "$PAIRS" --max_tokens "${L2T_MAX_TOKENS:-512}" --too_long drop
  fi
fi
FLAGS+=(--dataset "${PAIRS:-grammar}")

export NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT
mkdir -p train_logs
"${PYTHON:-python}" -m crosstune train "${FLAGS[@]}" "$@" 2>&1 | tee "train_logs/train_$(date +%Y%m%d_%H%M%S)_node$NODE_RANK.log"
"""
ENTRIES = (
    Entry(path="train.py", about="Fine-tune a model.", command=("train",)),
    Entry(
        path="pt_app/eval_model/judge_train_mps.py",
        about="Train a judge on Apple MPS, or on the CPU where there is none.",
        command=("judge", "train"),
        backends=("mps", "cpu"),
        output_dir="adapters_eval",
    ),
    Entry(
        path="pt_app/eval_model/judge_train_cuda.py",
        about="Train a judge on an NVIDIA GPU, or on the CPU where there is none.",
        command=("judge", "train"),
        backends=("cuda", "rocm", "cpu"),
        output_dir="adapters_eval",
    ),
    Entry(
        path="scripts/training/train_qwen_english_l2t_stable.sh",
        about="Train latent diffusion, configured by environment variables.",
        command=("train",),
        script=_L2T_SCRIPT,
    ),
)
"""The scripts of the original interface."""

_PYTHON = '''"""{about} Written by `crosstune adopt`; it accepts the options of `crosstune {command}`."""

import sys

from crosstune.cli.adopt import run_entry

if __name__ == "__main__":
    sys.exit(run_entry("{name}", sys.argv[1:]))
'''


def make_parser() -> Parser:
    listed = "\n".join(f"  {entry.path:<40} {entry.about}" for entry in ENTRIES)
    parser = Parser(
        "adopt",
        description=f"Write scripts that run crosstune at the original paths:\n\n{listed}",
        epilog=EXAMPLES,
    )
    parser.add_argument("folder", type=read_path, metavar="DIR", help="project folder")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    written = adopt(own.folder, force=own.force)
    names = [str(path) for path in written]
    return print_result({"written": names}, [f"written  {name}" for name in names], as_json=own.json)


def adopt(folder: Path, *, force: bool = False) -> list[Path]:
    """Write all entries into a folder; raise a UserError first if a file exists that crosstune did not write."""
    texts = {folder / entry.path: entry_text(entry) for entry in ENTRIES}
    taken = [path for path, text in texts.items() if path.exists() and _read(path) != text]
    if taken and not force:
        raise UserError(
            f"{taken[0]} already exists" + (f", and {len(taken) - 1} more." if len(taken) > 1 else "."),
            why="it is not a file that crosstune wrote.",
            do="move it away, or replace it with --force",
        )
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    return list(texts)


def entry_text(entry: Entry) -> str:
    command = " ".join(entry.command)
    return entry.script or _PYTHON.format(about=entry.about, command=command, name=entry.name)


def run_entry(name: str, words: Sequence[str]) -> int:
    """Run an entry's command with these arguments."""
    from crosstune.cli.main import main

    entry = next(entry for entry in ENTRIES if entry.name == name)
    line = entry_words(entry, words)
    code = main([*entry.command, *line])
    if entry.output_dir is not None and line != list(words):
        _publish(Path(_value(line, ("output_dir",)) or "").expanduser(), _value(line, ("name",)))
    return code


def entry_words(entry: Entry, words: Sequence[str]) -> list[str]:
    """Return the arguments with the options that the entry adds."""
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    added: list[str] = []
    if given & {"help", "h"} or "-h" in words:
        return list(words)
    backend = _value(words, ("backend",))
    if entry.backends and backend is None:
        backend = _available(entry.backends)
        _say_fallback(entry, backend)
        added += ["--backend", backend]
    if entry.output_dir is not None and "resume" not in given:
        if "output_dir" not in given:
            added += ["--output_dir", entry.output_dir]
        if "name" not in given:
            model = _value(words, ("model", "model_name")) or _preset_model(backend)
            added += ["--name", Path(model).name, "--overwrite"]
    return [*words, *added]


def _available(backends: Sequence[str]) -> str:
    from crosstune.machines.probe import probe_machine

    found = probe_machine(backends=list(backends)).available()
    return next((name for name in backends if name in found), backends[0])


def _say_fallback(entry: Entry, backend: str) -> None:
    """Warn if an entry does not train on the device in its name."""
    if backend != entry.backends[0]:
        from crosstune.cli.terminal.output import WARNING, Output

        Output().line(
            f"warning  {entry.name}.py: no {entry.backends[0].upper()} device found; training on {backend} with the preset for "
            f"{backend} (model, precision, optimizer); see `crosstune doctor`",
            style=WARNING,
        )


def _preset_model(backend: str | None) -> str:
    """Return the default model of `judge train`."""
    from crosstune.recipes.judge.presets import BY_BACKEND

    return str(BY_BACKEND.get(backend or "", BY_BACKEND["cpu"])["model_name"])


def _publish(folder: Path, name: str | None) -> None:
    """Copy the result of a finished run to NAME_final, replacing an older one."""
    from crosstune.files import atomic_files
    from crosstune.files.json_files import read_json
    from crosstune.models.identity import RECORD

    summary = read_json(folder / str(name) / "summary.json")
    result = folder / str(name) / Path(str(summary.get("result"))).name
    target = folder / f"{name}_final"
    if name is None or summary.get("status") != "finished" or not result.is_dir():
        return
    if target.exists() and not (target / RECORD).is_file():
        print(
            f"kept     {atomic_files.set_aside(target)}, because it is not the result of a run",
            file=sys.stderr,
        )
    with atomic_files.staging_folder(target) as staging:
        shutil.copytree(result, staging / "new")
        atomic_files.put_in_place(staging / "new", target, aside=staging / "old")
    print(f"written  {target}", file=sys.stderr)


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name.replace("-", "_") in names:
            return value if equals else next(iter(words[place + 1 : place + 2]), None)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
