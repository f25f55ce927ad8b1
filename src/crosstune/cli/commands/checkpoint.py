"""`crosstune checkpoint` and `move`: list, verify, show, prune, export and import checkpoints, and pack a run to move it."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import (
    ActionParser,
    Line,
    Parser,
    announce_command,
    at_least,
    print_result,
    read_path,
    read_run_path,
)
from crosstune.cli.terminal.figures import size
from crosstune.core.errors import EXIT_DONE, EXIT_USER_MUST_ACT, UserError
from crosstune.files.outputs import check_output_folder
from crosstune.files.paths import shown_path
from crosstune.files.run_record import has_record

if TYPE_CHECKING:
    from crosstune.checkpoint.read import Checkpoint


EXAMPLES = """examples:
  crosstune checkpoint list runs/demo
  crosstune checkpoint verify runs/demo                    every byte of every checkpoint
  crosstune checkpoint show runs/demo/checkpoints/latest
  crosstune checkpoint prune runs/demo --keep_last_n 1 --keep_every 500
  crosstune checkpoint export runs/demo/checkpoints/step-00000100 --out adapter-100
  crosstune checkpoint import old.pt --out runs/old --model_name ORG/MODEL --train_type full

`import` reads a file written by torch.save, with tensors and plain values only. Pass the options of train that describe
its model and method; `crosstune train --resume RUN` then continues from it."""

_HELP = {
    "list": "list the checkpoints of a run",
    "verify": "read every file and compare its hash with the recorded one",
    "show": "print the contents of a checkpoint",
    "prune": "remove old checkpoints",
    "export": "write the adapter or model of a checkpoint for other tools",
    "import": "make a checkpoint from a file written by torch.save",
}


def make_parser() -> ActionParser:
    parser = ActionParser("checkpoint", _HELP, description="Checkpoints of a run:", epilog=EXAMPLES)
    parser.add_argument("target", type=read_run_path, metavar="RUN|CHECKPOINT|FILE")
    add = parser.add_for
    add("export import", "--out", type=read_path, help="folder for the result")
    add("prune", "--keep_last_n", type=at_least(1), default=3, help="number of newest checkpoints to keep")
    add("prune", "--keep_every", type=at_least(0), default=0, help="also keep steps divisible by N")
    add("prune", "--drop_best", action="store_true", help="do not keep the best checkpoint")
    add("prune", "--dry_run", action="store_true", help="only print what would be removed")
    add("import", "--step", type=at_least(0), help="number of finished steps, if not in the file")
    add("import", "--without_optimizer", action="store_true", help="import only the weights")
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    own, flags = parser.parse_known_args(list(words))
    if flags and own.action not in ("import", "export"):
        parser.refuse_unknown(flags)
    parser.refuse_others(own)
    if own.action in ("import", "export") and own.out is None:
        parser.error(f"{own.action} needs --out")
    if own.action == "export":
        from crosstune.models.staged import check_out

        check_out(own.out.absolute())
        return _export(own, flags)
    if own.action == "import":
        check_output_folder(own.out, option="out")
        if has_record(own.out):
            raise UserError(f"{own.out} already contains a run.", do="choose a different --out")
        return _import(own, flags)
    return {"list": _list, "verify": _verify, "show": _show, "prune": _prune}[own.action](own)


def _folders(target: Path) -> list[tuple[int, Path]]:
    from crosstune.checkpoint.folders import FOLDER, checkpoint_folders, step_of
    from crosstune.checkpoint.read import missing_checkpoint
    from crosstune.files.paths import missing_run

    if not target.exists():
        raise missing_checkpoint(target) if target.parent.name == FOLDER else missing_run(target)
    for root in (target / FOLDER, target):
        if found := checkpoint_folders(root):
            return found
    folder = target.resolve()
    step = step_of(folder)
    if step is not None and folder.is_dir():
        return [(step, folder)]
    raise UserError(
        f"{target} contains no checkpoints.",
        do="pass a run folder, or a folder such as RUN/checkpoints/step-00000100",
    )


def _rows(target: Path, *, hashes: bool) -> list[dict[str, Any]]:
    from crosstune.checkpoint.manifest import DamagedCheckpoint, UnknownVersion
    from crosstune.checkpoint.read import open_checkpoint
    from crosstune.checkpoint.rotate import lowest

    rows: list[dict[str, Any]] = []
    newest: Checkpoint | None = None
    for step, folder in _folders(target):
        row: dict[str, Any] = {"step": step, "path": str(folder), "problem": ""}
        rows.append(row)
        try:
            found = open_checkpoint(folder, hashes=hashes)
        except (DamagedCheckpoint, UnknownVersion) as error:
            row["problem"] = error.why
            continue
        newest = newest or found
        row |= {
            "bytes": found.num_bytes(),
            "created": found.manifest.created,
            "backend": found.manifest.backend,
            "loss": found.manifest.progress.get("final_loss"),
        }
    losses = _evaluations(newest) if newest is not None else {}
    best = lowest([row["step"] for row in rows], losses)
    for row in rows:
        row |= {"eval_loss": losses.get(row["step"]), "best": row["step"] == best}
    return rows


def _evaluations(newest: Checkpoint) -> dict[int, float]:
    """Return step -> evaluation loss, from the summary and the newest manifest: an evaluation runs after the checkpoint of
    its step."""
    from crosstune.checkpoint.manifest import EVALUATIONS
    from crosstune.checkpoint.read import find_run
    from crosstune.files.json_fields import check_fields
    from crosstune.files.json_files import read_json

    path = find_run(newest.folder) / "summary.json"
    summary = read_json(path)
    check_fields(summary, {"evaluations": EVALUATIONS}, source=path)
    known = (summary.get("evaluations") or {}) | (newest.manifest.progress.get("evaluations") or {})
    return {int(step): loss for step, loss in known.items() if loss is not None}


def _list(own: Any) -> int:
    rows = _rows(own.target, hashes=False)
    return print_result({"checkpoints": rows}, map(_listed, rows), as_json=own.json)


def _listed(row: Mapping[str, Any]) -> Line:
    if row["problem"]:
        return f"{Path(row['path']).name}  damaged: {row['problem']}"
    parts = [f"{size(row['bytes']):>10}", str(row["created"]), row["backend"]]
    parts += [f"loss {row['loss']:.4f}"] if row["loss"] is not None else []
    parts += [f"eval {row['eval_loss']:.4f}"] if row["eval_loss"] is not None else []
    return f"{Path(row['path']).name}  {'  '.join(parts + ['best'] * row['best'])}"


def _verify(own: Any) -> int:
    rows = _rows(own.target, hashes=True)
    lines = (
        f"{Path(row['path']).name}  "
        + (f"damaged: {row['problem']}" if row["problem"] else f"valid, {size(row['bytes'])}")
        for row in rows
    )
    print_result({"checkpoints": rows}, lines, as_json=own.json)
    return EXIT_USER_MUST_ACT if any(row["problem"] for row in rows) else EXIT_DONE


def _show(own: Any) -> int:
    from crosstune.cli.terminal.screen import Screen
    from crosstune.runs.resume import pick_checkpoint

    with Screen(live=False) as screen:
        found = pick_checkpoint(own.target, screen)
    manifest = found.manifest
    identity, progress = manifest.identity, manifest.progress
    trained = sum(math.prod(facts["shape"]) for facts in manifest.trainable.values())
    lines = {
        "checkpoint": found.folder,
        "step": f"{found.step} of {manifest.schedule.get('num_steps', '?')}",
        "written": f"{manifest.created} on {manifest.backend} ({manifest.engine}), {manifest.precision}",
        "model": identity.get("model", {}).get("name"),
        "method": f"{manifest.method}, {trained:,} trained parameters in {len(manifest.trainable)} tensors",
        "base": manifest.quantization or "not quantized",
        "data": f"epoch {manifest.data.get('epoch')}, row {manifest.data.get('row_in_epoch')}",
        "tokens": progress.get("tokens"),
        "loss": progress.get("final_loss"),
        "size": size(found.num_bytes()),
    }
    shown = (f"{name:<11} {value}" for name, value in lines.items())
    return print_result(manifest.to_json(), shown, as_json=own.json)


def _prune(own: Any) -> int:
    from crosstune.checkpoint.folders import step_of
    from crosstune.checkpoint.rotate import Keep, rotate
    from crosstune.files.run_lock import hold

    if step_of(own.target.resolve()) is not None:
        raise UserError(f"{own.target} is a single checkpoint.", do="pass the run folder")
    keep = Keep(last_n=own.keep_last_n, best=not own.drop_best, every=own.keep_every)
    with contextlib.nullcontext() if own.dry_run else hold(own.target):
        rows = _rows(own.target, hashes=False)
        evaluations = {row["step"]: row["eval_loss"] for row in rows if row["eval_loss"] is not None}
        root = Path(rows[0]["path"]).parent
        removed = [str(path) for path in rotate(root, keep, evaluations, dry_run=own.dry_run)]
    lines = [f"{'would remove' if own.dry_run else 'removed'}  {path}" for path in removed]
    found = {"removed": removed, "dry_run": own.dry_run}
    return print_result(found, lines or ["nothing to remove"], as_json=own.json)


def _export(own: Any, flags: Sequence[str]) -> int:
    from crosstune.cli.terminal.screen import Screen
    from crosstune.config.load import load_config
    from crosstune.runs.restore import export_checkpoint
    from crosstune.runs.resume import pick_checkpoint

    config = load_config(flags)
    unused = sorted(set(config.sources) - {"backend", "model_name"})
    if unused:
        raise UserError(
            f"export does not accept --{unused[0]}.",
            do="remove it: the checkpoint records the run's options",
        )
    with Screen(live=not own.json) as screen:
        report = export_checkpoint(
            pick_checkpoint(own.target, screen),
            own.out.absolute(),
            observer=screen,
            backend=config.backend,
            model_name=config.model_name if "model_name" in config.sources else None,
        )
    return print_result(report, [f"written  {report['path']} (step {report['step']})"], as_json=own.json)


def _import(own: Any, flags: Sequence[str]) -> int:
    from crosstune.checkpoint.folders import FOLDER
    from crosstune.cli.terminal.screen import Screen
    from crosstune.config.load import load_config
    from crosstune.runs.import_torch_save import import_checkpoint

    root = own.out.absolute() / FOLDER
    with Screen(live=not own.json) as screen:
        report = import_checkpoint(
            own.target,
            load_config(flags),
            root,
            observer=screen,
            step=own.step,
            without_optimizer=own.without_optimizer,
        )
    lines = [
        f"written  {report['path']} (step {report['step']}, {report['weights']} weights)",
        f"moments  {', '.join(report['moments']) or 'none: the optimizer state starts fresh'}",
        f"continue crosstune train --resume {own.out} --dataset ...",
    ]
    return print_result(report, lines, as_json=own.json)


MOVE_EXAMPLES = """examples:
  crosstune move runs/demo --to mlx
  crosstune move runs/demo/checkpoints/step-00000200 --to cuda --out demo.crosstune.tar
  crosstune train --resume demo.crosstune.tar --backend mlx          on the other machine

The archive contains the newest valid checkpoint (weights, optimizer, schedule, data position), the logs and local data
files, but not the base model: the other machine downloads it or finds it with --model_name. The loss on the next
batches is measured on this machine, and again on the other before training continues."""


def make_parser_move() -> Parser:
    parser = Parser(
        "move", description="Pack a run into one archive to continue it elsewhere.", epilog=MOVE_EXAMPLES
    )
    add = parser.add_argument
    add("target", type=read_run_path, metavar="RUN|CHECKPOINT")
    add("--to", required=True, metavar="BACKEND", help="target backend: mlx, cuda, mps, cpu, ...")
    add("--out", type=read_path, help="path of the archive (default: next to the run)")
    add("--overwrite", action="store_true", help="replace an existing archive")
    add("--machine", help="target machine: a profile or a file written by `crosstune doctor --json`")
    add("--model_name", help="the base model on this machine, if not under its recorded name")
    add("--without_data", action="store_true", help="do not include local data files")
    add("--force", action="store_true", help="write the archive even if the losses differ too much")
    return parser


def run_move(words: Sequence[str]) -> int:
    own = make_parser_move().parse_args(list(words))

    announce_command("move", str(own.target), "importing the engine")
    from crosstune.cli.terminal.screen import Screen
    from crosstune.runs.move import move

    with Screen(live=not own.json) as screen:
        report = move(
            own.target,
            to=own.to,
            observer=screen,
            out=own.out.absolute() if own.out else None,
            machine=own.machine,
            with_data=not own.without_data,
            force=own.force,
            overwrite=own.overwrite,
            model_name=own.model_name,
        )
    return print_result(report, _move_lines(report), as_json=own.json)


def _move_lines(report: Mapping[str, Any]) -> Iterator[Line]:
    assumed = ", typical for this backend; specify yours with --machine" if report["assumed_machine"] else ""
    yield f"machine  planned for {report['machine']}{assumed}"
    if report["compared"] is None:
        why = f"this machine has no {report['to']}"
        if report["to"] == report["from"]:
            why = "the backend is the same"
        elif report["to"] == report["measured"]["backend"]:
            why = f"this machine has no {report['from']}"
        yield f"note     {why}: the loss is compared on the other machine, before training continues"
    yield f"written  {report['path']} ({size(report['bytes'])}, step {report['step']})"
    if report["model"]:
        yield (
            f"base     {report['model']['name']} is not in the archive: provide it under this name on the other machine, or "
            "pass --model_name"
        )
    more = f" --model_name {report['model_name']}" if report["model_name"] else ""
    more += " --world_size 1" if report["processes"] > 1 else ""
    yield f"continue crosstune train --resume {shlex.quote(shown_path(report['path']))} --backend {report['to']}{more}"
