"""Compare a result with the trained model: logits on a few prompts, rendered chat, bos and eos tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import shown
from crosstune.core.logit_distance import BOUNDS, Agreement, Logits, Prompts
from crosstune.data.render.rendering import encode_prompt, render
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.staged import Unverified, unverified_path

_PROMPTS = (
    "What is the capital of France?",
    "Turn on the light in the kitchen at seven, and play some music after that.",
    "Write three short sentences about the sea, one for each of the colours blue, green and grey.",
)
_SAMPLES = 3
VERDICT = ("agreement", "bound", "verified")
"""The keys of `report_agreement`."""
_TOKENS_SHOWN = 12
"""Tokens before a difference."""
_LONGEST_PROMPT = 512
"""A chat template may add any number of tokens."""


def make_prompts(folder: Path, samples: Sequence[Mapping[str, Any]] = ()) -> list[list[int]]:
    """Return the fixed prompts, and a run's last sampled answers after their prompts, tokenized with the folder's tokenizer and
    chat template."""
    tokenizer, answers = Tokenizer.from_folder(folder), dict[str, str]()
    for sample in samples:
        prompt, answer = sample.get("prompt"), sample.get("answer")
        if isinstance(prompt, str) and isinstance(answer, str) and not sample.get("pictures"):
            answers[prompt] = answer
    rows = [
        [
            *encode_prompt([{"role": "user", "content": prompt}], tokenizer),
            *tokenizer.rust.encode(answer, add_special_tokens=False).ids,
        ]
        for prompt, answer in list(answers.items())[:_SAMPLES]
    ]
    return [*_encode_prompts(tokenizer), *(row for row in rows if len(row) <= _LONGEST_PROMPT)]


def report_agreement(agreement: Agreement, *formats: str, difference: str = "") -> dict[str, Any]:
    """Report the agreement and its bound, which depends on the coarsest dtype or quantization involved, and a difference as
    text."""
    bound = max(BOUNDS.get(word.partition("_")[0] if word not in BOUNDS else word, 1.0) for word in formats)
    more = {"difference": difference} if difference else {}
    return {"agreement": agreement.to_json() | more, "bound": bound, "verified": agreement.relative <= bound}


def largest_difference(folder: Path, prompts: Prompts, expected: Logits, found: Logits) -> str:
    """Show the token of which the trained model is surest where a result prefers another; empty if there is none. `folder` has
    the tokenizer."""
    best, text, tokenizer = 0.0, "", Tokenizer.from_folder(folder)
    for prompt, own, other in zip(prompts, expected, found, strict=True):
        for place, (ours, theirs) in enumerate(zip(own.argmax(-1), other.argmax(-1), strict=True)):
            if (margin := float(own[place, ours] - own[place, theirs])) > best:
                before = prompt[max(0, place + 1 - _TOKENS_SHOWN) : place + 1]
                best, text = margin, show_choice(tokenizer, before, int(theirs), int(ours), by="it")
    return text


def show_choice(tokenizer: Tokenizer, before: Sequence[int], theirs: int, ours: int, *, by: str) -> str:
    start, *words = (shown(tokenizer.decode(ids, keep_special=True)) for ids in ([*before], [theirs], [ours]))
    return f"after {start}, {by} continues with {words[0]} instead of {words[1]}"


def refuse_unverified(report: Mapping[str, Any], out: Path, *, do: str | None = None) -> None:
    """Raise Unverified if the report has problems, or logits beyond their bound; `do` replaces the advice."""
    problems = list(report.get("problems", ()))
    if not report["verified"]:
        problems.append(
            f"its logits differ by {report['agreement']['relative']:.2g} (relative) from the trained model, "
            f"beyond the bound of {report['bound']:g}"
        )
    if problems:
        raise Unverified(
            f"The result differs from the trained model; it is kept as {unverified_path(out)}.",
            why="; ".join(problems) + ".",
            do=do or "do not use that folder; report it as a bug with these numbers",
        )


def chat_problems(before: Path, after: Path) -> list[str]:
    """Describe how the written tokenizer differs. A base without a chat template may get its adapter's."""
    new = Tokenizer.from_folder(after)
    old = replace(Tokenizer.from_folder(before), reads_parts=new.reads_parts)  # an adapter has no config.json
    if old.chat_template is None:
        new = replace(new, chat_template=None)
    turns = [
        {"role": "user", "content": _PROMPTS[0]},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": _PROMPTS[1]},
    ]
    problems = []
    if render(turns, old, add_generation_prompt=True) != render(turns, new, add_generation_prompt=True):
        problems.append("the chat template renders differently")
    if _encode_prompts(old) != _encode_prompts(new):
        problems.append("the tokens of a prompt differ")
    for role, ours, theirs in (("bos", old.bos_token, new.bos_token), ("eos", old.eos_token, new.eos_token)):
        if ours != theirs:
            problems.append(f"the {role} token is {shown(theirs)} instead of {shown(ours)}")
    return problems


def _encode_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    prompts = [encode_prompt([{"role": "user", "content": text}], tokenizer) for text in _PROMPTS]
    return [prompt[:_LONGEST_PROMPT] for prompt in prompts]
