"""`crosstune push`: publish a run on the Hugging Face hub, with a model card."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from crosstune.cli.arguments import Parser, announce_command, print_result, read_path, read_run
from crosstune.cli.terminal.figures import size
from crosstune.cli.terminal.output import Output
from crosstune.files.atomic_files import put_new, remove_abandoned, staging_folder

EXAMPLES = """examples:
  crosstune push runs/demo --to ORG/NAME --dry_run           (writes the files, shows the card, sends nothing)
  crosstune push runs/demo --to ORG/NAME
  crosstune push runs/demo --to ORG/NAME --what gguf --public

A new repository is private unless --public is given. The card describes the base model and its license, the options, the
metrics, the loss curve and how to use the model. It contains no rows of the data and no paths of this machine."""


def make_parser() -> Parser:
    about = "Publish a run on the Hugging Face hub, with a model card."
    parser = Parser("push", description=about, epilog=EXAMPLES)
    add = parser.add_argument
    add("target", type=read_run, metavar="RUN", help="a run")
    add(
        "--to",
        required=True,
        metavar="ORG/NAME",
        help="the repository on the hub; created if it does not exist",
    )
    what = "the adapter (default), the merged model, or a GGUF file; a fully trained run is always merged or gguf"
    add("--what", choices=("adapter", "merged", "gguf"), help=what)
    base = "the base model on the hub, if the run was trained on a local folder"
    add("--base", metavar="ORG/NAME", help=base)
    add("--license", metavar="NAME", help="license of the base model (default: from its card on the hub)")
    add("--public", action="store_true", help="create a public repository (default: private)")
    add("--dry_run", action="store_true", help="write the files to --out and send nothing")
    add("--out", type=read_path, metavar="FOLDER", help="with --dry_run: an empty folder for the files")
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    own = parser.parse_args(list(words))
    if own.out is not None and not own.dry_run:
        parser.error("--out needs --dry_run")

    from crosstune.models.staged import check_out

    if own.out is not None:
        check_out(own.out)
    announce_command("push", own.target, "reading the run")

    from crosstune.cli.terminal.screen import Screen
    from crosstune.report.files import load_run
    from crosstune.report.model_card import CURVE, CardFacts, loss_curve, model_card
    from crosstune.results import push
    from crosstune.runs.trained_folder import find_trained

    trained = find_trained(own.target)
    what = own.what or ("merged" if trained.adapter is None else "adapter")
    request = push.PushRequest(target=own.target, repo=own.to, what=what, base=own.base, public=own.public)
    push.check_push(request, trained)
    if not own.dry_run:
        push.check_token()
    record = load_run(Path(own.target))
    base = push.base_on_hub(request, trained)
    with _folder_for_files(own.out) as folder, Screen(live=not own.json) as screen:
        files = push.stage_files(request, trained, folder, observer=screen)
        curve = loss_curve(record)
        if curve is not None:
            (folder / CURVE).write_text(curve, encoding="utf-8")
        notes = []
        if trained.quantization is not None and what == "adapter":
            notes.append(f"The adapter was trained on a base quantized to {trained.quantization.bits} bits.")
        if own.base is None and base != (trained.record.get("base") or {}).get("name") and "/" in base:
            notes.append(
                "It was trained on a 4-bit version of these weights; results on the original may differ."
            )
        facts = CardFacts(
            repo=own.to,
            what=what,
            base=base,
            license=own.license or push.base_license(base),
            files=files,
            notes=notes,
        )
        card = model_card(record, facts, has_curve=curve is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        lines = [f"  {name:<28} {size(count):>10}" for name, count in sizes.items()]
        url = None if own.dry_run else push.upload(request, folder, say=Output().line)
    if own.dry_run:
        where = (
            f"written  {own.out}"
            if own.out is not None
            else "nothing was written; --out FOLDER keeps the files"
        )
        lines = [*lines, "", *card.splitlines(), "", f"{where}; nothing was sent"]
    else:
        lines.append(
            f"pushed   {url}{'' if own.public else '   (private, unless the repository was public before)'}"
        )
    data = {"repo": own.to, "what": what, "url": url, "files": sizes, "card": card}
    return print_result(data, lines, as_json=own.json)


@contextlib.contextmanager
def _folder_for_files(out: Path | None) -> Iterator[Path]:
    """Yield an empty folder, and move it to `out` at the end; a temporary folder without `out`."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="crosstune-push-") as scratch:
            yield Path(scratch)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out.parent)
    with staging_folder(out) as home:
        folder = home / "files"
        folder.mkdir()
        yield folder
        put_new(folder, out)
