"""Make preference pairs: sample answers, score them, keep the best and the worst. Check pairs with a second judge.

A trained judge or a user's Python function scores the answers.
"""

from __future__ import annotations

import gc
import glob
import importlib
import inspect
import itertools
import math
import numbers
import runpy
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from crosstune.core.answers import Answer
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer, Warned
from crosstune.core.intervals import wilson
from crosstune.core.sampling import Sampling
from crosstune.data.read.files import file_part
from crosstune.files.journal import SUFFIX, Journal, file_stamps
from crosstune.files.outputs import write_output
from crosstune.recipes.judge.items import Item, Score, Scorer, answer_item, transcript
from crosstune.recipes.judge.verdicts import is_number
from crosstune.recipes.preference.read_pairs import read_preferences
from crosstune.results.chat_model import open_chat_model
from crosstune.results.prompt_file import Prompt, json_line
from crosstune.runs.judges import find_judge_scorer
from crosstune.runs.trained_folder import find_trained

ARGUMENTS = ("prompt", "answer", "messages", "reference")
"""The arguments that a function may have."""


def find_scorer(name: str, *, backend: str = "auto") -> Scorer:
    """Find a function, or a trained judge: a run, an adapter or a model folder."""
    file, _, function = name.rpartition(":")
    if file and not Path(name).expanduser().exists():
        return _find_function(file, function)
    return find_judge_scorer(name, backend=backend)


def _is_finite(found: Any) -> bool:
    try:
        return isinstance(found, numbers.Real) and math.isfinite(float(found))
    except OverflowError:
        return False


def _find_function(file: str, name: str) -> Scorer:
    """Import a user's function, which runs the code of its module."""
    path, spec = Path(file).expanduser().absolute(), f"{file}:{name}"
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UserError(f"There is no file {file} (--judge).", do="check the path")
    sys.path.insert(0, str(path.parent if is_file else Path.cwd()))  # as `python FILE` does
    try:
        with redirect_stdout(sys.stderr):  # what a user's code prints is no result of the command
            module = runpy.run_path(str(path)) if is_file else vars(importlib.import_module(file))
    except (Exception, SystemExit) as error:
        why, do = f"{type(error).__name__}: {error}.", "correct the file, or install what it imports"
        if not is_file and isinstance(error, ModuleNotFoundError) and error.name == file:
            do = "a function is FILE.py:FUNCTION or MODULE:FUNCTION"
        raise UserError(f"--judge {spec} cannot be imported.", why=why, do=do) from error
    define, function = f"define it as `def {name}(prompt, answer)`, and return a number", module.get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name}.", do=define)
    takes = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes)
    names = [each for each in ARGUMENTS if takes_all or each in {one.name for one in takes}]
    needed = {one.name for one in takes if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD}
    if "answer" not in names or not needed <= {*ARGUMENTS}:
        wrong = ", ".join(sorted(needed - {*ARGUMENTS}))
        found = f"it needs {wrong}, but" if wrong else "it has no argument answer, and"
        why = f"{found} is called by name with {', '.join(ARGUMENTS)}, if it accepts them."
        raise UserError(f"{spec} cannot score.", why=why, do=define)

    def score(item: Item) -> float:
        values = {**item.extra, "answer": item.answers[0], "reference": item.reference or None}
        place = f"prompt {item.group} ({shown(values['prompt'])})"
        do = "correct the function, then run the same command again"
        try:
            with redirect_stdout(sys.stderr):
                found = function(**{each: values[each] for each in names})
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})."
            raise UserError(f"{spec} failed for {place}.", why=why, do=do) from error
        if not _is_finite(found):
            why = f"it returned {shown(found)}, which is not a finite number."
            raise UserError(f"{spec} did not score {place}.", why=why, do=do)
        return float(found)

    def open_scorer(observer: Observer) -> Score:
        return lambda items: [score(item) for item in items]

    identity = [spec, file_stamps(Path(str(module.get("__file__"))))]
    return Scorer(name=spec, open=open_scorer, identity=identity, runs_code=True)


Progress = Callable[[str, int, int], None]
"""Called with the kind of work, the finished number and the total."""
Row = dict[str, Any]
PREFERENCES = ("chosen", "rejected", "tie", "unscored")
_BLOCK = 64
"""Answers sampled, or items scored, between two writes of the journal."""
_NUM_BUCKETS = 4


@dataclass(frozen=True, kw_only=True)
class MakeRequest:
    model: str
    prompts: Sequence[Prompt]
    out: Path
    sampling: Sampling
    num: int = 4
    margin: float = 0.0
    max_new_tokens: int = 256
    backend: str = "auto"
    precision: str = "auto"


def make_pairs(request: MakeRequest, scorer: Scorer, *, observer: Observer, progress: Progress) -> Row:
    """Write the pairs and return counts. Answers and scores are kept next to the output until it is written; a different
    judge or margin continues with the same answers."""
    if request.margin > scorer.span:
        why = f"the scores of {scorer.name} differ by at most {scorer.span:g}."
        raise UserError(f"--margin {request.margin:g} is never reached.", why=why, do="lower --margin")
    sampled = _sample(request, scorer, observer, progress)
    gc.collect()  # a session has reference cycles, and the judge may need its memory
    asked = [_questions(request, place, row, scorer) for place, row in enumerate(sampled.rows)]
    out = request.out.with_name(f"{request.out.name}.scores")
    scored = _score(scorer, [*itertools.chain(*asked)], out, observer, progress)
    about = {"model": request.model, "judge": scorer.name}
    scores, rows, without = iter(scored.rows), list[Row](), Counter[str]()
    for prompt, items in zip(request.prompts, asked, strict=True):
        found = _choose([(item, next(scores)["score"]) for item in items], request.margin, scorer.tie)
        if isinstance(found, str):
            without[found] += 1
        else:
            rows.append({"prompt": list(prompt.messages)} | found | about)
    if not rows:
        why = "; ".join(f"{count:,} with {reason}" for reason, count in without.items())
        do = "lower --margin, which keeps the answers and scores, or raise --temperature or --num"
        raise UserError(f"None of the {len(asked):,} prompts has a pair.", why=f"{why}.", do=do)
    write_output(request.out, b"".join(map(json_line, rows)))
    sampled.remove()
    scored.remove()
    for other in out.parent.glob(f"{glob.escape(out.name)}{SUFFIX}~*"):  # scores of another judge
        other.unlink(missing_ok=True)
    num_cut = sum(row["num_cut"] for row in sampled.rows)
    found = about | {"output": str(request.out), "num_prompts": len(asked), "num_pairs": len(rows)}
    found |= {"without_pair": dict(without), "num_answers": request.num * len(asked), "num_cut": num_cut}
    found |= {f"mean_{name}": fmean(row[f"score_{name}"] for row in rows) for name in PREFERENCES[:2]}
    return found


def _sample(request: MakeRequest, scorer: Scorer, observer: Observer, progress: Progress) -> Journal:
    """Return a journal with the answers to each prompt, and the number that reached --max_new_tokens. Equal prompts have
    the same answers, which do not depend on the other prompts."""
    trained, total = find_trained(request.model), request.num * len(request.prompts)
    files = file_stamps(trained.adapter, Path(trained.base).expanduser())
    asked = [repr(replace(request, out=Path(), margin=0.0)), files]
    with Journal(request.out, asked, say=lambda said: observer.on_event(Warned(message=said))) as journal:
        if len(journal.rows) == len(request.prompts):
            return journal
        model = open_chat_model(
            request.model, observer=observer, backend=request.backend, precision=request.precision
        )
        talks = [prompt.messages for prompt in request.prompts]
        places = [f"prompt {place} ({shown(transcript(talk))})" for place, talk in enumerate(talks, start=1)]
        tokens = model.encode(talks, places, num_new=request.max_new_tokens)
        while (start := len(journal.rows)) < len(request.prompts):
            # a failing function fails before the long work
            count = 1 if scorer.runs_code and not start else -(-_BLOCK // request.num)
            block = tokens[start : start + count]
            done = itertools.count(request.num * start)
            every = [prompt for prompt in dict.fromkeys(block) for _ in range(request.num)]
            found: dict[tuple[int, ...], list[Answer]] = defaultdict(list)
            answers = model.session.sample(
                every,
                max_new_tokens=request.max_new_tokens,
                stop_ids=sorted(model.tokenizer.stop_ids),
                sampling=request.sampling,
                on_answer=lambda _, done=done: progress("answers", next(done), total),  # type: ignore[misc]
            )
            for prompt, answer in zip(every, answers, strict=True):
                found[prompt].append(answer)
            rows = [
                {
                    "answers": [model.tokenizer.decode(one.content).strip() for one in found[prompt]],
                    "num_cut": sum(not one.stopped for one in found[prompt]),
                }
                for prompt in block
            ]
            if scorer.runs_code and not start:
                scorer.open(observer)(_questions(request, 0, rows[0], scorer))
            journal.add(rows)
        progress("answers", total, total)
    return journal


def _questions(request: MakeRequest, place: int, row: Row, scorer: Scorer) -> list[Item]:
    """Return the items to score: each different answer, or each pair of answers. Nothing can be trained on an empty answer."""
    different = [answer for answer in dict.fromkeys(row["answers"]) if answer]
    chosen = itertools.combinations(different, 1 + scorer.compares) if len(different) > 1 else ()
    prompt = request.prompts[place]
    return [answer_item(prompt.messages, answers, place + 1, prompt.reference or "") for answers in chosen]


def _choose(scored: Sequence[tuple[Item, float | None]], margin: float, tie: float) -> Row | str:
    """Return the best and the worst answer with their scores, or the reason why there is no pair. The score of a compared
    answer is its mean probability of being better than another answer."""
    values: dict[str, list[float]] = defaultdict(list)
    for item, score in scored:
        for answer, value in zip(item.answers, () if score is None else (score, 1 - score), strict=False):
            values[answer].append(value)
    if len(values) < 2:
        return f"fewer than two {'answers that could be scored' if scored else 'different answers'}"
    (low, worst), *_, (high, best) = sorted((fmean(found), answer) for answer, found in values.items())
    if high - low <= tie or high - low < margin:
        return "equal scores, or a difference below --margin"
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (best, worst))
    return {"chosen": chosen, "rejected": rejected, "score_chosen": high, "score_rejected": low}


def _score(
    scorer: Scorer, items: Sequence[Item], out: Path | None, observer: Observer, progress: Progress
) -> Journal:
    """Return a journal with the score of each item."""
    asked = [scorer.identity, repr(list(items))]
    with Journal(out, asked, say=lambda s: observer.on_event(Warned(message=s)), block=_BLOCK) as journal:
        score = scorer.open(observer) if len(journal.rows) < len(items) else None
        progress("scores", len(journal.rows), len(items))
        while score is not None and len(journal.rows) < len(items):
            part = items[len(journal.rows) : len(journal.rows) + _BLOCK]
            journal.add({"score": found} for found in score(part))
            progress("scores", len(journal.rows), len(items))
    return journal


def check_pairs(path: Path, scorer: Scorer, out: Path | None, observer: Observer, progress: Progress) -> Row:
    """Compare pairs with the preferences of a second judge; write each pair with its preference to `out`."""
    rows, items, part = list[Row](), list[Item](), file_part(path)
    for row in part.rows():
        try:
            [pair] = read_preferences(row.row, paired=True)
        except UserError as error:
            message = f"{part.place(row.number)}: {error.message}"
            form = "a row has prompt, chosen and rejected, each text or a list of messages"
            do = form if "--" in error.do else error.do  # this command has no options of training
            raise UserError(message, why=error.why, do=do) from error
        rows.append(row.row)
        both = tuple(transcript(answer) for answer in pair.answers)
        asked = [both] if scorer.compares else [both[:1], both[1:]]
        items += [answer_item(pair.prompt, answers, len(rows)) for answers in asked]
    if not rows:
        raise UserError(f"{path} has no pairs.", do="make them with `crosstune pairs make`")
    journal = _score(scorer, items, out, observer, progress)
    scores, size = [row["score"] for row in journal.rows], len(items) // len(rows)
    said = [_prefer(scores[start : start + size], scorer.tie) for start in range(0, len(scores), size)]
    if out is not None:
        pairs = zip(rows, said, strict=True)
        write_output(out, b"".join(json_line({**row, "second_judge": one}) for row, one in pairs))
        journal.remove()
    sides = [(row.get("score_chosen"), row.get("score_rejected")) for row in rows]
    order = sorted((a - b, n) for n, (a, b) in enumerate(sides) if is_number(a) and is_number(b))
    buckets, count = list[Row](), min(_NUM_BUCKETS, len(order))
    for number in range(count):
        own = order[len(order) * number // count : len(order) * (number + 1) // count]
        buckets.append({"from": own[0][0], "to": own[-1][0]} | agreement([said[n] for _, n in own]))
    same = sum(row.get("judge") == scorer.name for row in rows)
    return agreement(said) | {"judge": scorer.name, "num_same_judge": same, "buckets": buckets}


def _prefer(scores: Sequence[float | None], tie: float) -> str:
    """Return one of PREFERENCES. A single score is the probability that the chosen answer is better."""
    first, second = (*scores, 0.5)[:2]
    if first is None or second is None:
        return "unscored"
    return "tie" if abs(first - second) <= tie else "chosen" if first > second else "rejected"


def agreement(said: Sequence[str]) -> Row:
    """Return counts, and the fraction of decided pairs whose chosen answer is preferred, with its Wilson interval."""
    found: Row = {"num_pairs": len(said)} | {f"num_{name}": said.count(name) for name in PREFERENCES}
    n = found["num_chosen"] + found["num_rejected"]
    if not n:
        return found | {"agreement": None, "interval": [0.0, 1.0]}
    share = found["num_chosen"] / n
    return found | {"agreement": share, "interval": list(wilson(share, n))}
