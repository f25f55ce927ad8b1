"""Write the model card of a run and its loss curve as an SVG file, without rows of the data and without local paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.option import StringKind
from crosstune.config.schema import options_by_name
from crosstune.core import __version__
from crosstune.core.intervals import wilson
from crosstune.core.safe_text import redact
from crosstune.data.named_datasets import BUNDLED, DUMMY, HUB_NAMES
from crosstune.report.charts import run_charts
from crosstune.report.eval_section import collect_eval
from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.formatting import show_count, show_examples, show_option
from crosstune.report.outcome import METHODS, evaluations, summed
from crosstune.report.template import draw_file

CURVE = "loss.svg"
_OMITTED = (
    "precision",
    "backend",
    "model_name",
    "overwrite",
    "skip_eval",
    "resume",
    "log_to",
    "quiet",
    "name",
)


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts of a model card that are not in the run's record."""

    repo: str
    what: str
    """adapter, merged or gguf."""
    base: str
    """The hub id of the base model, or a name without a path."""
    license: str | None
    files: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def loss_curve(run: RunFiles) -> str | None:
    """Return the loss chart as a self-contained SVG file; None if no loss is recorded."""
    chart = next((chart for chart in run_charts(run) if chart.title == "Loss" and chart.values), None)
    return draw_file(chart) if chart is not None else None


def model_card(run: RunFiles, facts: CardFacts, *, has_curve: bool) -> str:
    """Return README.md with its metadata."""
    parts = [_metadata(run, facts), f"# {facts.repo.partition('/')[2]}\n", _summary(run, facts)]
    parts += [f"> {note}\n" for note in facts.notes]
    parts += ["## Use\n", _usage(facts)]
    rows = [*_metric_rows(run), *_benchmark_rows(run)]
    if rows:
        parts += ["## Results\n", _table(("metric", "before", "after"), rows)]
        parts.append(
            "Intervals are 95 % confidence intervals. Metrics without an interval are means over tokens.\n"
        )
    if has_curve:
        parts += ["## Training\n", f"![Loss over the steps of training]({CURVE})\n"]
    parts += ["## Data\n", _data(run), "## Options\n", _table(("option", "value"), list(_options(run)))]
    parts.append(f"Trained with crosstune {__version__}.\n")
    return redact("\n".join(parts))


def _metadata(run: RunFiles, facts: CardFacts) -> str:
    recipe = str(mapping(run.plan.get("options")).get("recipe") or "sft")
    relation = {"adapter": "adapter", "merged": "finetune", "gguf": "quantized"}[facts.what]
    library = {"adapter": "peft", "merged": "transformers", "gguf": "llama.cpp"}[facts.what]
    known: dict[str, Any] = {"base_model": facts.base} if "/" in facts.base else {}
    known |= {"base_model_relation": relation} if known else {}
    known |= {"license": facts.license} if facts.license else {}
    known |= {"library_name": library, "pipeline_tag": "text-generation"}
    known["tags"] = ["crosstune", recipe, str(run.plan.get("method") or "full")]
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n"


def _summary(run: RunFiles, facts: CardFacts) -> str:
    method = METHODS.get(str(run.plan.get("method")), "all of its weights")
    counted = show_examples(mapping(run.plan.get("data")))
    on = f" on {counted}" if counted else ""
    terms = (
        f"License of the base model: {facts.license}."
        if facts.license
        else "See the base model for its license."
    )
    return f"{facts.base}, fine-tuned with {method}{on} for {run.last_step:,} step{'s' * (run.last_step != 1)}. {terms}\n"


def _usage(facts: CardFacts) -> str:
    name = facts.repo.partition("/")[2]
    if facts.what == "gguf":
        file = next((file for file in facts.files if file.endswith(".gguf")), "model.gguf")
        return _code(
            "",
            f"hf download {facts.repo} {file} --local-dir .\ncrosstune serve {file}\nllama-cli -hf {facts.repo} -cnv",
        )
    kind, package = ("AutoPeftModelForCausalLM", "peft")
    if facts.what == "merged":
        kind, package = ("AutoModelForCausalLM", "transformers")
    lines = [
        f"from {package} import {kind}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {kind}.from_pretrained("{facts.repo}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.repo}")',
        'chat = [{"role": "user", "content": "Hello"}]',
        'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
    ]
    shell = f"hf download {facts.repo} --local-dir {name}\ncrosstune chat {name}"
    if facts.what == "merged":
        shell = f"crosstune chat {facts.repo}"
    return _code("python", "\n".join(lines)) + "\n" + _code("", shell)


def _metric_rows(run: RunFiles) -> Iterator[tuple[str, ...]]:
    """Yield the evaluated metrics, fractions with a Wilson interval over the held-out examples."""
    count = number(mapping(mapping(run.plan.get("data")).get("eval")).get("examples"))
    for row in evaluations(run):
        cells = []
        for value in (row.before, row.after):
            text = value.text if value is not None else "–"
            if value is not None and count and row.label == "exact match" and value.full:
                low, high = wilson(float(value.full), int(count))
                text += f" ({100 * low:.1f} to {100 * high:.1f})"
            cells.append(text)
        yield (f"held-out {row.label}", *cells)


def _benchmark_rows(run: RunFiles) -> Iterator[tuple[str, ...]]:
    found = collect_eval(run.folder)
    for row in found["rows"] if found else ():
        yield (f"{row['task']}, {row['metric']} ({row['format']})", row["before"], row["after"])


def _data(run: RunFiles) -> str:
    """Describe the training data by counts alone."""
    options, found = mapping(run.plan.get("options")), mapping(run.plan.get("data"))
    train, held = mapping(found.get("train")), mapping(found.get("eval"))
    name = str(options.get("dataset") or "")
    bases = (Path(), *run.folder.parents)
    is_path = not re.fullmatch(r"[\w-]+/[\w-]+", name) or any((base / name).exists() for base in bases)
    if name in HUB_NAMES:
        source = HUB_NAMES[name].repo
    elif name in (*BUNDLED, DUMMY):
        source = f"{name}, a dataset of crosstune"
    else:
        source = "a local file, not published" if is_path or not name else name
    rows = [("source", source)]
    rows += [
        (label, show_count(amount).text)
        for label, amount in (
            ("examples", number(train.get("examples"))),
            ("tokens per epoch", number(train.get("tokens"))),
            ("longest example in tokens", number(train.get("longest"))),
            ("held-out examples", number(held.get("examples"))),
            ("trained tokens", summed(run, "tokens")),
        )
        if amount is not None
    ]
    return _table(("", ""), rows)


def _options(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield the requested options with their resolved values, without paths and names of this machine."""
    known, used = options_by_name(), mapping(run.plan.get("options"))
    yield "precision", str(run.plan.get("precision"))
    yield "backend", str(run.plan.get("backend"))
    for name in run.asked:
        option = known.get(name)
        if option is None or option.holds is not StringKind.WORDS or name in _OMITTED:
            continue
        value = show_option(used.get(name)).text
        if not value.startswith(("/", "~", ".")):
            yield name, value


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```\n"
