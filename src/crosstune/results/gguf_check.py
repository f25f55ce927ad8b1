"""Prove a GGUF file in llama.cpp: token ids, special tokens, chat template, logits and greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category, is_normalized

from crosstune.core.errors import shown
from crosstune.core.events import Observer, Preparing
from crosstune.core.logit_distance import Logits, measure_agreement
from crosstune.data.render.rendering import prompts_have_bos
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models import llama_cpp
from crosstune.models.folder import read_config_json
from crosstune.models.gguf_families import read_family
from crosstune.models.gguf_tokenizer import find_kind, read_tokenizer
from crosstune.results.opened import Opened, read_logits, show_rows
from crosstune.results.run_rows import RunRows
from crosstune.results.verify import report_agreement, show_choice

NEW_TOKENS = 16
_MUST = (
    "Hello, world!  It's 2024-11-18, and we'll pay $1,234,567.89 (about 12.5%).",
    " leading space, trailing space ",
    "line one\nline two\n\n\tindented\r\n    four spaces",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0x1F]}  # comment\n",
    "THEY'RE SURE YOU'VE SEEN IT'S o'clock, don't",
    "Ça va très bien à l'école. Größe, Straße, naïve café. ¿Qué tal? Žluťoučký kůň",
    "Привет, мир! Γειά σου Κόσμε.",
    "你好，世界。こんにちは、世界。안녕하세요 세계",
    "1234567890 12 345 6789 3.14159",
    "https://example.com/a?b=c&d=e#f user@example.org C:\\path\\file.txt",
    "emoji 🙂🚢 and symbols ± ≤ ∞ → … “quoted” ‘text’ — dash",
)
"""Every supported tokenizer must give the same tokens for these."""
_MAY = ("नमस्ते दुनिया", "สวัสดีชาวโลก", "שָׁלוֹם עוֹלָם", "مَرْحَبًا بالعالم", "e\u0301 a\u0300 combining", "ﬁ ½ ② Ⅳ")
"""llama.cpp's patterns treat combining marks of some scripts differently; a difference is a warning."""
_FAR_KL = 0.5
"""In nats per token. Coarse types round a small adapter away."""
_FORMATS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "q8_0": "q8_0"}


def check_in_llama_cpp(
    file: Path,
    folder: Path,
    opened: Opened,
    observer: Observer,
    *,
    kind: str,
    expected: Logits,
    rows: RunRows,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Compare a GGUF file with the model folder it was made from: return a report with `problems` and `warnings`.
    `expected` are the trained model's logits; `rows` are the run's texts, and the prompts to answer greedily."""
    tokenizer = Tokenizer.from_folder(folder)
    family, config = read_family(folder, read_config_json(folder))
    splitting = find_kind(folder, read_tokenizer(folder))
    special = [f"{token}Answer: 7\n{token} 8" for token in tokenizer.special[:64]]
    built_in = [*_MUST, *special]
    before = tokenizer.bos_token or "" if splitting.prefix == "first" else ""
    texts = [before + text for text in (*built_in, *rows.texts, *_MAY)]
    starts = rows.prompts or opened.prompts
    prompts = [*opened.prompts, *rows.prompts]
    show = show_rows(observer, f"check    {file.name} in llama.cpp", len(prompts), what="prompts")
    answers = llama_cpp.ask(
        file,
        texts=texts,
        prompts=prompts,
        starts=starts,
        max_new_tokens=NEW_TOKENS,
        tokens=sorted(tokenizer.stop_ids),
        adapter=adapter,
        show=show,
    )
    show(len(prompts))
    encoded = tokenizer.rust.encode_batch(texts, add_special_tokens=False)
    problems, warnings, num_different = [], [], 0
    for place, (text, ours, theirs) in enumerate(zip(texts, encoded, answers.tokens, strict=True)):
        if ours.ids == theirs:
            continue
        num_different += 1
        sentence = f"{shown(text[:80])} has the tokens {theirs[:12]} in llama.cpp instead of {ours.ids[:12]}"
        if place < len(built_in) or (place < len(texts) - len(_MAY) and not _is_rare(text)):
            problems.append(sentence)
        else:
            warnings.append(sentence)
    if len(warnings) > 1:
        warnings[0] += f", and {len(warnings) - 1} more of {len(texts)} texts differ"
    if adapter is None:
        problems += _special_problems(answers, tokenizer)
    # llama.cpp computes GELU from a table in fp16.
    by_table = ("fp16",) if family.activation.startswith("gelu") else ()
    formats = (opened.precision, bound_name(kind), *by_table)
    fixed, asked = answers.logits[: len(expected)], answers.logits[len(expected) :]
    verdict = report_agreement(measure_agreement(expected, fixed), *formats)
    pairs = list(zip(starts, answers.continuations, strict=True))
    observer.on_event(Preparing(doing="computing the same answers with the trained model"))
    logits = read_logits(folder, replace(opened, prompts=[[*prompt, *made] for prompt, made in pairs]))
    rounding = verdict["agreement"]["max_abs"]
    if asked:
        own = [found[: len(prompt)] for found, (prompt, _) in zip(logits, pairs, strict=True)]
        on_prompts = report_agreement(measure_agreement(own, asked), *formats)
        rounding = max(rounding, on_prompts["agreement"]["max_abs"])
        verdict["on_run_prompts"] = on_prompts
        if not on_prompts["verified"]:
            problems.append(
                f"its logits on the run's prompts differ by {on_prompts['agreement']['relative']:.2g} (relative), beyond "
                f"the bound of {on_prompts['bound']:g}"
            )
    kl = max(each["agreement"]["mean_kl"] for each in (verdict, verdict.get("on_run_prompts", verdict)))
    far = [
        f"at a mean KL divergence of {kl:.2g} its answers may be others than the trained model's: use a larger type"
    ]
    same, explained = compare_answers(pairs, logits, rounding, tokenizer)
    # With experts, rounding may choose a different expert, and then a different token.
    exact = ("f32",) if "num_local_experts" in config else ("f32", "f16", "bf16")
    if not explained and kind in exact:
        problems.append(f"a greedy answer differs: {same['difference']}")
    return verdict | {
        "texts": {"compared": len(texts), "same": len(texts) - num_different, "of_run": len(rows.texts)},
        "answers": same,
        "problems": problems[:3],
        "warnings": [*(far if kl > _FAR_KL else ()), *warnings[:1]],
    }


def bound_name(kind: str) -> str:
    """Return the name of a GGUF type in the table of bounds: a dtype, or its bits."""
    return _FORMATS.get(kind) or next(letter for letter in kind if letter.isdigit())


def _special_problems(answers: llama_cpp.Answers, tokenizer: Tokenizer) -> list[str]:
    """Describe special tokens, stops or a chat template that llama.cpp reads differently."""
    problems = []
    for role, text in (("bos", tokenizer.bos_token), ("eos", tokenizer.eos_token)):
        wanted = tokenizer.rust.token_to_id(text) if text else None
        if wanted is not None and answers.special[role] != wanted:
            problems.append(f"the {role} token is {answers.special[role]} in llama.cpp instead of {wanted}")
    missing = sorted(tokenizer.stop_ids - set(answers.ends))
    if missing:
        names = [tokenizer.rust.id_to_token(token) for token in missing]
        problems.append(f"llama.cpp does not stop at {', '.join(map(shown, names))}")
    if answers.adds_bos != (adds_bos := prompts_have_bos(tokenizer)):
        problems.append(f"llama.cpp adds a bos token: {answers.adds_bos}, prompts have one: {adds_bos}")
    if (answers.template or None) != (tokenizer.chat_template or None):
        problems.append("the chat template differs in llama.cpp")
    return problems


def _is_rare(text: str) -> bool:
    """Return True for characters that llama.cpp's patterns split differently for some tokenizers: combining marks,
    capitals beyond ASCII, spaces beyond ASCII, and decomposed letters."""
    rare = ("Mn", "Mc", "Me", "Lu", "Lt", "Zs")
    return not is_normalized("NFC", text) or any(each > "\x7f" and category(each) in rare for each in text)


def compare_answers(
    pairs: Sequence[tuple[Sequence[int], list[int]]], logits: Logits, rounding: float, tokenizer: Tokenizer
) -> tuple[dict[str, Any], bool]:
    """Compare llama.cpp's greedy answers to prompts, each with its end token, with the model's own choice at each token, by its
    `logits`. Return the counts with one difference as text, and True if rounding explains all differences."""
    same, difference, explained = 0, "", True
    for (prompt, made), found in zip(pairs, logits, strict=True):
        own = found[len(prompt) - 1 : -1]
        chosen = own.argmax(-1).tolist()
        same += chosen == made
        for place, (ours, theirs) in enumerate(zip(chosen, made, strict=True)):
            is_far = float(own[place][ours] - own[place][theirs]) > 2 * rounding
            if ours != theirs and (not difference or (is_far and explained)):
                difference = show_choice(tokenizer, made[:place], theirs, ours, by="llama.cpp")
            explained &= not is_far
    total = sum(len(made) for _, made in pairs)
    counts = {"compared": len(pairs), "same": same, "tokens": total, "difference": difference}
    return counts, explained
