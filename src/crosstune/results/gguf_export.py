"""Write GGUF results: a model, an adapter alone, and the folder that Ollama reads; check each in llama.cpp."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer, Preparing
from crosstune.core.logit_distance import measure_agreement
from crosstune.core.quantization import GGUF_PLAIN
from crosstune.data.render.rendering import prompts_have_bos, render
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models import gguf, llama_cpp
from crosstune.models.adapter_files import read_matrices
from crosstune.models.folder import read_config_json
from crosstune.models.gguf_families import read_family, tensor_name
from crosstune.models.gguf_writer import Importance, check_gguf, write_adapter, write_gguf
from crosstune.models.quantized_folder import read_quantization, stored_format
from crosstune.models.staged import Stage
from crosstune.results.gguf_check import bound_name, check_in_llama_cpp
from crosstune.results.gguf_search import REQUEST, Search
from crosstune.results.merge import DenseModel
from crosstune.results.opened import Form, Opened, read_logits, show_bytes
from crosstune.results.run_rows import RunRows, read_run_rows
from crosstune.results.verify import VERDICT, report_agreement
from crosstune.runs.trained_folder import Trained


def check(opened: Opened, form: Form, observer: Observer) -> tuple[RunRows, list[str]]:
    """Raise a UserError if the target cannot be written as GGUF; return the run's rows to check it with, and warnings."""
    required = ""
    if form.imatrix or form.max_kl is not None:
        required = _check_measured(opened.trained, form)
    warnings = check_gguf(opened.model.path, form.kind)
    if not opened.engine.reads_gguf:
        llama_cpp.require_llama_cpp("Cannot check a GGUF file without torch.")
    if form.adapter_only:
        _check_adapter_alone(opened.trained, opened.model.path)
    rows = read_run_rows(opened, observer, required=required)
    if form.imatrix and not rows.train:
        raise UserError(required, why="its recipe keeps no rows of tokens.", do="remove --imatrix")
    if form.max_kl is not None and not rows.held_out:
        do = "choose a type, such as --gguf_type q6_k"
        raise UserError(required, why="the run has no held-out rows.", do=do)
    return rows, [*warnings, *rows.warnings]


def write(
    stage: Stage,
    source: DenseModel,
    opened: Opened,
    form: Form,
    observer: Observer,
    *,
    rows: RunRows,
    title: str = "",
) -> dict[str, Any]:
    """Write a GGUF file, or an adapter as one; for Ollama also its Modelfile. `title` is the final name of the file."""
    if form.adapter_only:
        return _write_adapter_alone(stage, source, opened, observer, rows=rows)
    report = _write_model(stage, source, opened, form, observer, rows=rows, title=title)
    if form.to == "ollama":
        tokenizer = Tokenizer.from_folder(source.folder)
        report["said"] = [*report["said"], *write_modelfile(stage.result, report["file"], tokenizer)]
    return report


def _write_model(
    stage: Stage,
    source: DenseModel,
    opened: Opened,
    form: Form,
    observer: Observer,
    *,
    rows: RunRows,
    title: str,
) -> dict[str, Any]:
    """Write a GGUF file, and check it in llama.cpp or, without it, with transformers' and crosstune's readers."""
    kind, max_kl, weighted = form.kind, form.max_kl, form.imatrix
    plain = stored_format(source.folder).replace("fp", "f")
    stage.result.mkdir()
    said = []
    if Tokenizer.from_folder(source.folder).chat_template is None:
        said.append(
            "the model has no chat template, so the file has none: llama.cpp writes chats as ChatML, Ollama passes on the text"
        )
    importance = _measure_importance(source.folder, rows.train, opened, observer) if weighted else None
    report: dict[str, Any] = {"problems": []}
    if max_kl is None:
        kind = plain if kind == "auto" else kind
        name = f"model-{kind}.gguf"
        file = stage.result / name
        _write(source.folder, file, kind, title or name, observer, importance)
    else:

        def write(path: Path, kind: str, types: Mapping[str, str], similar: Path | None) -> None:
            _write(source.folder, path, kind, f"{kind}, to measure", observer, importance, types, similar)

        search = Search(source.folder, opened, rows.held_out, write, stage.scratch, observer)
        chosen, trials = search.run(plain=plain, max_kl=max_kl, weighted=weighted)
        kind = chosen.kind
        name = "model-auto.gguf"
        file = search.best.rename(stage.result / name)
        report |= {"trials": [each.to_json() for each in trials], "chosen": chosen.to_json()}
        report["max_kl"], report["num_tokens"] = max_kl, search.num_tokens
    report |= {"kind": kind, "file": name}
    if importance is not None:
        report["num_weighted"] = len(importance)
    if not llama_cpp.is_installed():
        report |= _check_in_other_readers(file, kind, stage, source, opened, observer)
        return report | {
            "said": [*said, "not checked in llama.cpp; to do so: pip install 'crosstune[llamacpp]'"]
        }
    compare = functools.partial(
        check_in_llama_cpp,
        folder=source.folder,
        opened=opened,
        observer=observer,
        expected=source.expected,
        rows=rows,
    )
    checked = compare(file, kind=kind)
    report = _with_llama_cpp(report | {"said": said}, checked)
    if kind not in (*GGUF_PLAIN, "q8_0"):
        # Quantization error can hide a wrong conversion, so compare the unquantized model too.
        dense = stage.scratch / "plain.gguf"
        _write(source.folder, dense, plain, f"{plain}, to compare", observer)
        exact = compare(dense, kind=plain)
        if not exact["verified"] or exact["problems"]:
            report["problems"].append("llama.cpp computes different logits even before quantization")
        report["unquantized"] = exact
    return report


def _check_in_other_readers(
    file: Path, kind: str, stage: Stage, source: DenseModel, opened: Opened, observer: Observer
) -> dict[str, Any]:
    """Compare the file in transformers and in crosstune's own reader, for a machine without llama.cpp."""
    observer.on_event(Preparing(doing=f"reading {file.name} in {opened.engine.reader}"))
    found = read_logits(stage.result, opened, gguf=file.name)
    report = report_agreement(measure_agreement(source.expected, found), opened.precision, bound_name(kind))
    observer.on_event(Preparing(doing=f"reading {file.name} in crosstune"))
    reread = stage.scratch / "reread"
    reread.mkdir()
    gguf.convert(file, reread)
    again = measure_agreement(source.expected, read_logits(reread, opened))
    own = report_agreement(again, opened.precision, stored_format(reread), bound_name(kind))
    problems = [] if own["verified"] else ["crosstune's own GGUF reader reads different weights"]
    return report | {
        "checked_by": opened.engine.reader,
        "own_reader": own,
        "reread": reread,
        "problems": problems,
    }


def _write_adapter_alone(
    stage: Stage, source: DenseModel, opened: Opened, observer: Observer, *, rows: RunRows
) -> dict[str, Any]:
    """Write the adapter as a GGUF file, and check it in llama.cpp over its base model: it computes the merged model."""
    trained = opened.trained
    assert trained.adapter is not None
    stage.result.mkdir()
    name = "adapter.gguf"
    matrices = read_matrices(trained.adapter, trained.settings)
    write_adapter(opened.model.path, stage.result / name, matrices, trained.settings)
    plain = stored_format(opened.model.path).replace("fp", "f")
    base = stage.scratch / "base.gguf"
    _write(opened.model.path, base, plain, f"base in {plain}, to compare", observer)
    checked = check_in_llama_cpp(
        base,
        source.folder,
        opened,
        observer,
        kind=plain,
        expected=source.expected,
        rows=rows,
        adapter=stage.result / name,
    )
    return _with_llama_cpp({"kind": "f32", "file": name, "problems": [], "said": []}, checked)


def _check_adapter_alone(trained: Trained, base: Path) -> None:
    """Raise a UserError if the adapter cannot be used without merging it in llama.cpp."""
    request = "The adapter cannot be written alone as GGUF."
    if trained.adapter is None:
        raise UserError(request, why="the target is a whole model.", do="remove --adapter_only")
    llama_cpp.require_llama_cpp(request)
    why = trained.why_merged
    if read_quantization(base) is not None:
        why = why or "its base is a quantized folder, which llama.cpp does not read"
    if why:
        raise UserError(request, why=f"{why}.", do="remove --adapter_only to export the merged model")


def write_modelfile(folder: Path, file: str, tokenizer: Tokenizer) -> list[str]:
    """Write Ollama's Modelfile next to a GGUF file: chat template, default system message and stops. Return warnings."""
    stops = sorted(tokenizer.decode([token], keep_special=True) for token in tokenizer.stop_ids)
    template, system = _go_template(tokenizer) or (None, "")
    if '"""' in f"{template}{system}":  # it would end the text of the Modelfile
        template, system = None, ""
    lines = [f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if stop]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if template is None and tokenizer.chat_template is not None:
        return [
            "the chat template has no equivalent in a Modelfile; Ollama uses the template in the GGUF file if its version "
            "reads it: compare `ollama show --template NAME`"
        ]
    return []


def _check_measured(trained: Trained, form: Form) -> str:
    """Raise a UserError if --imatrix or --max_kl cannot be used, or has no effect; return the first sentence of errors."""
    searches, kind = form.max_kl is not None, form.kind
    request = REQUEST if searches else "Cannot use --imatrix."
    if searches and kind != "auto":
        raise UserError(request, why=f"--gguf_type {kind} is the type.", do="use --gguf_type auto")
    if not searches and kind in ("auto", *GGUF_PLAIN, "q8_0"):
        why = f"it changes types of 6 bits or less, not {kind}."
        raise UserError(request, why=why, do="add --gguf_type q4_k_m")
    if not trained.is_run:
        why = f"the target is not a run, so it has no {'held-out' if searches else 'training'} rows."
        raise UserError(request, why=why, do="pass a run folder")
    llama_cpp.require_llama_cpp(request)
    return request


def _measure_importance(
    folder: Path, rows: list[list[int]], opened: Opened, observer: Observer
) -> Importance:
    """Return the mean squares of each linear layer's inputs on the training rows, by GGUF name."""

    def show(done: int, total: int) -> None:
        observer.on_event(Evaluating(done=done, total=total, what="rows", stage="importance of weights"))

    squares = opened.engine.input_squares(folder, rows, show=show)
    family, settings = read_family(folder, read_config_json(folder))
    named = {tensor_name(family, settings, layer): values for layer, values in squares.items()}
    return {name: values for name, values in named.items() if name is not None}


def _write(
    folder: Path,
    path: Path,
    kind: str,
    title: str,
    observer: Observer,
    importance: Importance | None = None,
    types: Mapping[str, str] | None = None,
    similar: Path | None = None,
) -> None:
    show = show_bytes(observer, "write", title)
    write_gguf(
        folder,
        path,
        kind=kind,
        importance=importance,
        types=types,
        similar=similar,
        adds_bos=prompts_have_bos(Tokenizer.from_folder(folder)),
        progress=lambda _, done, total: show(done, total or 0),
    )


def _with_llama_cpp(report: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """Add llama.cpp's verdict, problems and warnings to a report."""
    problems = [*report["problems"], *checked.pop("problems")]
    said = [*report["said"], *checked.pop("warnings")]
    verdict = {"checked_by": "llama.cpp", **{each: checked[each] for each in VERDICT}}
    return report | verdict | {"problems": problems, "said": said, "llama_cpp": checked}


def _go_template(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the chat template in Ollama's language, if each turn is a text before and after its content; and the system message
    that it writes into a chat without one."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": role, "content": f"\x01{role}\x02"} for role in ("system", "user", "assistant", "user")]

    def text(messages: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
        rendered = render(list(messages), tokenizer, add_generation_prompt=asks)
        return rendered.removeprefix(tokenizer.leading_bos) if tokenizer.leading_bos else rendered

    try:
        whole = [text(turns[:count], asks=False) for count in range(1, 5)]
        asked = text(turns, asks=True)
    except UserError:  # a template without a system turn
        return None
    pieces, done = dict[str, tuple[str, str]](), ""
    for turn, now in zip(turns, whole, strict=True):
        before, found, after = now.removeprefix(done).partition(turn["content"])
        is_same = pieces.setdefault(turn["role"], (before, after)) == (before, after)
        if not now.startswith(done) or not found or not is_same:
            return None
        done = now
    start = asked.removeprefix(done)
    alone = text(turns[1:2], asks=True)
    rest = turns[1]["content"].join(pieces["user"]) + start
    before, after = pieces["system"] if alone != rest else ("", "")
    system = alone.removesuffix(rest).removeprefix(before).removesuffix(after)
    written = before + system + after if system else ""
    if alone != written + rest or "{{" in done + start:
        return None
    cases = [
        f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for number, (role, (before, after)) in enumerate(pieces.items())
    ]
    return "{{ range .Messages }}" + "".join(cases) + "{{ end }}{{ end }}" + start, system
