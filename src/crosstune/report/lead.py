"""Say in a sentence what was trained, on what and how it went, with one answer before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.outcome import End, Measured, duration, evaluations, training_loss
from crosstune.report.quantity import show_count
from crosstune.report.samples import Answer, SampleRow, Samples, compare_answers
from crosstune.report.turning_points import best_evaluation

_METHODS = {
    "full": "all of its weights",
    "lora": "LoRA adapters",
    "dora": "DoRA adapters",
    "llama_pro": "new blocks (Llama-Pro)",
}
MOST_METRICS = 2
"""Evaluated metrics in the sentence; the cards below show all."""


@dataclass(frozen=True, kw_only=True)
class LeadSample:
    prompt: str
    reference: str
    titles: tuple[str, str]
    answers: tuple[Answer, Answer]


def lead_sentences(run: RunFiles, end: End) -> list[str]:
    """Return what was trained, how it went, and what the result is."""
    return [sentence for sentence in (_trained(run, end), _went(run), _result(run)) if sentence]


def _trained(run: RunFiles, end: End) -> str:
    verb = {"finished": "Trained", "running": "Training"}.get(end.status, "Began to train")
    parts = [f"{verb} {_what(run)}"]
    if data := _data(run):
        parts.append(f"on {data}")
    steps, planned = show_count(run.last_step).text, number(run.plan.get("num_steps"))
    if end.status == "finished" or not planned:
        parts.append(f"for {steps} step{'s' * (run.last_step != 1)}")
    else:
        parts.append(f"for {steps} of {planned:,.0f} steps")
    if (spent := duration(run)) is not None and run.summary.get("seconds"):
        parts.append(f"in {spent.text}")
    if backend := run.plan.get("backend") or run.summary.get("backend"):
        parts.append(f"on {backend}")
    return " ".join(parts) + "."


def _what(run: RunFiles) -> str:
    model = mapping(run.plan.get("model"))
    name = str(model.get("name") or run.asked.get("model_name") or "a model")
    recipe, method = str(run.asked.get("recipe") or "sft"), str(run.plan.get("method") or "")
    if model.get("source") == "recipe":
        return f"the model of the recipe {recipe}"
    name = Path(name).name if name.startswith(("/", ".", "~")) else name
    whole = f"{name} as a judge" if recipe == "judge" else name
    if quantizer := run.plan.get("quantizer"):
        bits = f"{run.plan['n_bits']}-bit " if run.plan.get("n_bits") else ""
        base = f" over a {bits}{quantizer} base" if quantizer != "none" else ""
    else:
        base = ""
    return f"{whole} with {_METHODS.get(method, method)}{base}" if method else whole


def _data(run: RunFiles) -> str:
    data = mapping(run.plan.get("data"))
    name: Any = data.get("dataset") or run.asked.get("dataset")
    examples = number(mapping(data.get("train")).get("examples"))
    if not name:
        return ""
    shown = Path(str(name)).name or str(name)
    return f"{show_count(examples).text} examples of {shown}" if examples else shown


def _went(run: RunFiles) -> str:
    """Say how the evaluated metrics changed; without an evaluation, the training loss."""
    found = [text for row in evaluations(run) if (text := _moved(row))]
    if found:
        return f"On held-out data {' and '.join(found[:MOST_METRICS])}."
    loss = training_loss(run)
    if loss is None or loss.change is None:
        return "Nothing held out was evaluated."
    return f"Nothing held out was evaluated; {_moved(loss, label='training loss')}."


def _moved(row: Measured, *, label: str = "") -> str:
    if row.change is None or row.before is None or row.after is None:
        return ""
    label = label or ("the loss" if row.label == "loss" else row.label)
    if row.change.verdict == "unchanged":
        return f"{label} stayed at {row.after.text}"
    if row.before.text == row.after.text:
        return f"{label} hardly changed from {row.after.text}"
    verb = "rose" if row.change.rising else "fell"
    worse = ", which is worse" if row.change.verdict == "worse" else ""
    return f"{label} {verb} from {row.before.text} to {row.after.text}{worse}"


def _result(run: RunFiles) -> str:
    best = best_evaluation(run)
    if best is None or best.is_last:
        return ""
    at = f"step {best.step:,.0f}"
    if run.summary.get("result_step") == best.step:
        return f"The result has the weights of {at}, the best evaluation."
    if best.overfits:
        return f"Evaluation was best at {at}; the model overfits after it."
    return ""


def lead_sample(samples: Samples) -> LeadSample | None:
    """Return the row that shows best what training changed, with its first and its last answer."""
    if len(samples.columns) < 2:
        return None
    rows = [row for row in samples.rows if row.answers[0].text is not None]
    rows = [row for row in rows if row.answers[-1].text]
    if not rows:
        return None
    row = max(rows, key=_interest)
    first, last = compare_answers([row.answers[0], row.answers[-1]])
    return LeadSample(
        prompt=row.prompt,
        reference=row.reference,
        titles=(samples.columns[0].title, samples.columns[-1].title),
        answers=(first, last),
    )


def _interest(row: SampleRow) -> tuple[bool, bool, int]:
    """Rank a row: an answer that became right first, then one that changed, then the shortest."""
    first, last = row.answers[0], row.answers[-1]
    became_right = last.mark == "match" and first.mark != "match"
    return became_right, first.text != last.text, -len(row.prompt) - len(last.text or "")
