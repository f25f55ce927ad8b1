"""`crosstune import`: turn another trainer's configuration into a file for `crosstune train --config`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.cli.arguments import Parser, print_result, read_path
from crosstune.cli.terminal.output import Output
from crosstune.config.load import load_config
from crosstune.core.errors import EXIT_DONE, UserError
from crosstune.files.outputs import check_output, is_stream, write_output

EXAMPLES = """examples:
  crosstune import axolotl.yml
  crosstune import llama3_lora_sft.yaml --from llamafactory --dataset chats.jsonl --out run.yaml
  crosstune import notebook.ipynb --lenient
  crosstune plan --config run.yaml

Reads YAML, JSON, a shell script or command line, and the Python code of a script or notebook, which is not executed. Options of crosstune
on the command line override the file. Each key is listed as mapped, equal to crosstune's default, without effect, or without a counterpart.
A key without a counterpart is an error unless --lenient leaves it out.
"""


def make_parser() -> Parser:
    from crosstune.importing.tools import TOOLS

    parser = Parser("import", description="Turn another trainer's configuration into YAML.", epilog=EXAMPLES)
    add = parser.add_argument
    add("file", type=read_path, metavar="FILE", nargs="?")
    add(
        "--from",
        dest="tool",
        choices=("auto", *TOOLS),
        default="auto",
        help="the trainer (default: recognized by its keys)",
    )
    add("--out", type=read_path, help="the file to write (default: crosstune.yaml next to FILE)")
    add("--overwrite", action="store_true", help="replace an existing file")
    add("--keys", action="store_true", help="list the keys of each trainer, as Markdown, and read no file")
    add("--lenient", action="store_true", help="leave out keys without a counterpart")
    return parser


def run(words: Sequence[str]) -> int:
    own, rest = make_parser().parse_known_args(list(words))

    if own.keys:
        print("\n".join(_key_page(own.tool)))
        return EXIT_DONE
    if own.file is None:
        raise UserError("crosstune import needs a file.", do="see: crosstune import --help")

    from crosstune.importing.translate import import_file

    out = own.out or own.file.with_name("crosstune.yaml")
    check = partial(check_output, out, option="out", inputs=[own.file], overwrite=own.overwrite)
    if own.out is not None:  # an error in the input is more useful than one about the default name
        check()
    overrides = load_config(rest, environment={}).options_asked() if rest else {}
    found = import_file(own.file, tool=own.tool, overrides=overrides)
    if found.missing and not own.lenient:
        lines = [f"{_place(own.file, note.line)}{note.key}: {note.text}" for note in found.missing]
        raise UserError(
            f"{len(lines)} of {len(found.notes)} keys {'has' if len(lines) == 1 else 'have'} no counterpart.",
            why="\n  ".join(["", *lines] if lines[1:] else lines),
            do="change them, pass the options named above to this command, or leave them out with --lenient",
        )
    if own.out is None:
        check()
    write_output(out, found.to_yaml().encode())
    report = {
        "from": found.tool.title,
        "out": str(out),
        "options": found.options,
        "added_defaults": found.added,
        "remark": found.remark,
        "keys": [asdict(note) for note in found.notes],
    }
    if is_stream(out):  # standard output may be the file
        for line in _lines(report, own.file):
            Output().line(line)
        return EXIT_DONE
    return print_result(report, _lines(report, own.file), as_json=own.json)


def _place(file: Path, line: int | None) -> str:
    return f"{file.name}:{line} " if line is not None else ""


def _lines(report: dict[str, Any], file: Path) -> Iterator[str]:
    from crosstune.importing.read import shown_value

    yield f"from     {report['from']}, {len(report['keys'])} keys"
    words = {"mapped": "mapped", "default": "default", "nothing": "no need", "missing": "left out"}
    for note in report["keys"]:
        line = f"{note['line']:>4} " if note["line"] is not None else ""
        yield f"{words[note['kind']]:<8} {line}{note['key']}: {shown_value(note['value'])} -> {note['text']}"
    for name, value in report["added_defaults"].items():
        yield f"added    {name}: {value} (the default of {report['from']})"
    if report["remark"]:
        yield f"note     {report['remark']}"
    yield f"written  {report['out']}"
    yield f"next     crosstune plan --config {shlex.quote(report['out'])}"


def _key_page(tool: str) -> Iterator[str]:
    """Yield a page with a table of keys for each trainer."""
    from crosstune.importing.tools import TOOLS, describe

    yield "# Imported keys"
    yield ""
    yield "The keys of other trainers that `crosstune import` reads, written by `crosstune import --keys`."
    for each in [TOOLS[tool]] if tool != "auto" else TOOLS.values():
        groups: dict[str, list[str]] = {}
        for key, rule in each.rules.items():
            groups.setdefault(describe(rule), []).append(f"`{key}`")
        yield f"\n## {each.title}\n\n{len(each.rules)} keys.\n\n| keys | in crosstune |\n|---|---|"
        for text, keys in groups.items():
            yield f"| {', '.join(keys)} | {text} |"
