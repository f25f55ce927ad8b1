"""`crosstune adopt`: write thin entry files at the paths of the guides, so that old commands keep working."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.cli.arguments import Parser, print_result, read_path
from crosstune.core.errors import UserError

EXAMPLES = """examples:
  crosstune adopt .
  crosstune adopt my-project --force"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file at a path of the guides, and the command that it stands for."""

    path: str
    """A .py or .sh file, relative to the folder of the project."""
    about: str
    command: tuple[str, ...]
    backends: tuple[str, ...] = ()
    """Backends to train on, unless --backend says another: the first that is available here."""
    output_dir: str | None = None
    """The folder of its runs, unless --output_dir says otherwise. A run is named for its model, and its result is also
    put into NAME_final beside it: the folder that the guide copies to another machine and loads with PEFT."""
    script: Callable[[], str] | None = None
    """Returns the text of a file that does more than pass its command line on."""

    @property
    def name(self) -> str:
        return Path(self.path).stem


def _l2t_script() -> str:
    from crosstune.recipes.latent_diffusion.entry_script import entry_script

    return entry_script(crosstune='"${PYTHON:-python}" -m crosstune')


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
        about="Train latent diffusion, set up by the variables of its guide.",
        command=("train",),
        script=_l2t_script,
    ),
)
"""The entries that the guides name. A new one is one more item here."""

_PYTHON = '''"""{about} Written by `crosstune adopt`; the options are those of `crosstune {command}`."""

import sys

from crosstune.cli.adopt import run_entry

if __name__ == "__main__":
    sys.exit(run_entry("{name}", sys.argv[1:]))
'''


def make_parser() -> Parser:
    listed = "\n".join(f"  {entry.path:<40} {entry.about}" for entry in ENTRIES)
    parser = Parser(
        "adopt",
        description=f"Write thin files at the paths that guides name, which run crosstune:\n\n{listed}",
        epilog=EXAMPLES,
    )
    parser.add_argument("folder", type=read_path, metavar="DIR", help="folder of the project")
    parser.add_argument("--force", action="store_true", help="replace files that are there already")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    written = adopt(own.folder, force=own.force)
    names = [str(path) for path in written]
    return print_result({"written": names}, [f"written  {name}" for name in names], as_json=own.json)


def adopt(folder: Path, *, force: bool = False) -> list[Path]:
    """Write all entries into a folder; raise before the first if one of the files is there and is not ours."""
    texts = {folder / entry.path: entry_text(entry) for entry in ENTRIES}
    taken = [path for path, text in texts.items() if path.exists() and _read(path) != text]
    if taken and not force:
        raise UserError(
            f"{taken[0]} exists already" + (f", and {len(taken) - 1} more." if len(taken) > 1 else "."),
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
    if entry.script is not None:
        return entry.script()
    return _PYTHON.format(about=entry.about, command=" ".join(entry.command), name=entry.name)


def run_entry(name: str, words: Sequence[str]) -> int:
    """Run the command of an entry with the words of its command line."""
    from crosstune.cli.main import main

    entry = next(entry for entry in ENTRIES if entry.name == name)
    line = entry_words(entry, words)
    code = main([*entry.command, *line])
    if entry.output_dir is not None and line != list(words):
        _publish(Path(_value(line, ("output_dir",)) or "").expanduser(), _value(line, ("name",)))
    return code


def entry_words(entry: Entry, words: Sequence[str]) -> list[str]:
    """Return the words of a command line with what the entry adds."""
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
    """Say that an entry does not train on the device that it is named for."""
    if backend != entry.backends[0]:
        from crosstune.cli.output import WARNING, Output

        Output().line(
            f"warning  {entry.name}.py: there is no {entry.backends[0].upper()} device here, so this trains on "
            f"{backend} with the model, precision and optimizer of the preset for {backend}; `crosstune doctor` says why",
            style=WARNING,
        )


def _preset_model(backend: str | None) -> str:
    """Return the model that `judge train` takes if none is named."""
    from crosstune.recipes.judge.presets import BY_BACKEND

    return str(BY_BACKEND.get(backend or "", BY_BACKEND["cpu"])["model_name"])


def _publish(folder: Path, name: str | None) -> None:
    """Copy the result of a finished run into NAME_final beside it, in place of an older result."""
    from crosstune.core import atomic_files
    from crosstune.core.json_files import read_json
    from crosstune.models.folder_record import RECORD

    summary = read_json(folder / str(name) / "summary.json")
    result = folder / str(name) / Path(str(summary.get("result"))).name
    target = folder / f"{name}_final"
    if name is None or summary.get("status") != "finished" or not result.is_dir():
        return
    if target.exists() and not (target / RECORD).is_file():
        print(f"kept     {atomic_files.set_aside(target)}, which is no result of a run", file=sys.stderr)
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
