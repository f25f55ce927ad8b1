"""`crosstune adopt`: write scripts and a configuration at the original paths, so that old commands keep working."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.cli.arguments import Parser, print_result, read_path
from crosstune.core.errors import UserError
from crosstune.files.outputs import write_output
from crosstune.files.plain_files import kind_of

EXAMPLES = """examples:
  crosstune adopt .
  crosstune adopt my-project --force"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file at an original path, and the command that it runs or configures."""

    path: str
    """Relative to the project folder."""
    about: str
    command: tuple[str, ...]
    copied: str | None = None
    """The template file next to this module; None for a Python script."""
    backends: tuple[str, ...] = ()
    """Defaults of --backend; the first one available is used."""
    output_dir: str | None = None
    """Default of --output_dir. The run is named after its model, and its result is copied to NAME_final, the folder that
    the original workflow moves to a different machine and loads with PEFT."""

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def text(self) -> str:
        """Return the contents of the script."""
        if self.copied is not None:
            return Path(__file__).with_name(self.copied).read_text(encoding="utf-8")
        return _PYTHON.format(about=self.about, command=" ".join(self.command), name=self.name)


ENTRIES = (
    Entry(path="train.py", about="Fine-tune a model.", command=("train",)),
    Entry(
        path="pt_app/eval_model/judge_train_mps.py",
        about="Train a judge on Apple MPS, otherwise on the CPU.",
        command=("judge", "train"),
        backends=("mps", "cpu"),
        output_dir="adapters_eval",
    ),
    Entry(
        path="pt_app/eval_model/judge_train_cuda.py",
        about="Train a judge on an NVIDIA GPU, otherwise on the CPU.",
        command=("judge", "train"),
        backends=("cuda", "rocm", "cpu"),
        output_dir="adapters_eval",
    ),
    Entry(
        path="scripts/training/train_qwen_english_l2t_stable.sh",
        about="Train latent diffusion, configured by environment variables.",
        command=("train",),
        copied="train_l2t.sh",
    ),
    Entry(
        path="latentDLM_mmdit/configs/mmdit_stable.yaml",
        about="The options that this shell script reads.",
        command=("train",),
        copied="mmdit_stable.yaml",
    ),
)
"""The files of the original interface."""

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
        description=f"Write files that run crosstune at the original paths:\n\n{listed}",
        epilog=EXAMPLES,
    )
    parser.add_argument("folder", type=read_path, metavar="DIR", help="project folder")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    names = [str(path) for path in adopt(own.folder, force=own.force)]
    return print_result({"written": names}, [f"written  {name}" for name in names], as_json=own.json)


def adopt(folder: Path, *, force: bool = False) -> list[Path]:
    """Write all entries into a folder; raise a UserError first if a file exists that crosstune did not write."""
    do = "pass a project folder, such as `.`"
    if folder.resolve() == Path(folder.anchor or "/"):
        raise UserError(f"{folder} is the root of the file system, not a project.", do=do)
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise UserError(f"{folder} is {kind_of(folder)}, not a folder.", do=do)
    texts = {folder / entry.path: entry.text() for entry in ENTRIES}
    taken = [path for path, text in texts.items() if path.exists() and path.read_bytes() != text.encode()]
    if taken and not force:
        raise UserError(
            f"{taken[0]} already exists" + (f", and {len(taken) - 1} more." if len(taken) > 1 else "."),
            why="it is not a file that crosstune wrote.",
            do="move it away, or replace it with --force",
        )
    new = [place for path in texts for place in (path, *path.parents) if not place.exists()]
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_output(path, text.encode())
            if path.suffix == ".sh":
                path.chmod(0o755)
    except UserError:
        for place in sorted({*new}, reverse=True):  # a folder after its files
            with contextlib.suppress(OSError):
                place.rmdir() if place.is_dir() else place.unlink()
        raise
    return list(texts)


def run_entry(name: str, words: Sequence[str]) -> int:
    """Run an entry's command with these arguments."""
    from crosstune.cli.main import main

    entry = next(entry for entry in ENTRIES if entry.name == name)
    line = entry_words(entry, words)
    code = main([*entry.command, *line])
    if entry.output_dir is not None and line != list(words):
        _publish(Path(_value(line, "output_dir") or "").expanduser(), _value(line, "name"))
    return code


def entry_words(entry: Entry, words: Sequence[str]) -> list[str]:
    """Return the arguments with the options that the entry adds."""
    if {"-h", "--help"} & set(words):
        return list(words)
    added: list[str] = []
    backend = _value(words, "backend")
    if entry.backends and backend is None:
        backend = _available(entry.backends)
        added += ["--backend", backend]
        if backend != entry.backends[0]:
            from crosstune.cli.terminal.output import WARNING, Output

            Output().line(
                f"warning  {entry.name}.py: no {entry.backends[0].upper()} device found; training on {backend} with the "
                f"preset for {backend} (model, precision, optimizer); see `crosstune doctor`",
                style=WARNING,
            )
    if entry.output_dir is not None and _value(words, "resume") is None:
        if _value(words, "output_dir") is None:
            added += ["--output_dir", entry.output_dir]
        if _value(words, "name") is None:
            from crosstune.recipes.judge.presets import BY_BACKEND

            preset = BY_BACKEND.get(backend or "", BY_BACKEND["cpu"])
            model = _value(words, "model", "model_name") or str(preset["model_name"])
            added += ["--name", Path(model).name, "--overwrite"]
    return [*words, *added]


def _available(backends: Sequence[str]) -> str:
    from crosstune.machines.probe import probe_machine

    found = probe_machine(backends=list(backends)).available()
    return next((name for name in backends if name in found), backends[0])


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
        kept = atomic_files.set_aside(target)
        print(f"kept     {kept}, because it is not the result of a run", file=sys.stderr)
    with atomic_files.staging_folder(target) as staging:
        shutil.copytree(result, staging / "new")
        atomic_files.put_in_place(staging / "new", target, aside=staging / "old")
    print(f"written  {target}", file=sys.stderr)


def _value(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option in a command line; None if it is not set."""
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name.replace("-", "_") in names:
            return value if equals else next(iter(words[place + 1 : place + 2]), None)
    return None
