"""Chat templates run in jinja's sandbox; a template from a file is first tried with limits on CPU time and memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.data.render.built_in_templates import read_template
from crosstune.data.render.rendering import render, render_conversation
from crosstune.data.render.types import Rendered
from crosstune.data.tokens import tokenizer as reader
from crosstune.data.tokens.tokenizer import Tokenizer

FILE = "/models/some/chat_template.jinja"
TURNS = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


REFUSED = {
    "one huge range": "{% for a in range(999999999) %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "much text in loops": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "a long template": "x" * 300_000,
    "our objects": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "our globals": "{{ raise_exception.__globals__.sys }}",
    "format to objects": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a file": "{% include '/etc/passwd' %}",
    "changing the input": "{{ messages.append(1) }}",
    "random texts": "{{ ['a', 'b'] | random }}",
    "random words": "{{ lipsum() }}",
}
ENDLESS = {
    "a loop without output": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
}
HUGE = {
    "doubling": "{% set ns = namespace(s='y') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "padding": "{{ 'x'.ljust(20000000000) }}",
}


@pytest.fixture
def base(tiny_model: Path) -> Tokenizer:
    return replace(Tokenizer.from_folder(tiny_model), template_file=FILE)


@pytest.mark.parametrize("name", REFUSED)
def test_the_sandbox_refuses_a_template(base: Tokenizer, name: str) -> None:
    tokenizer = replace(base, chat_template=REFUSED[name])
    with pytest.raises(UserError, match=FILE):
        render_conversation(TURNS, tokenizer, whole=False)


@pytest.mark.parametrize("name", [*ENDLESS, *HUGE])
def test_a_template_file_that_exceeds_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    run = reader.run_limited

    def limited(*words: Any, **settings: Any) -> bytes:
        return run(*words, **settings | {"cpu_seconds": 1})

    monkeypatch.setattr(reader, "run_limited", limited)
    path = tmp_path / "hostile.jinja"
    path.write_text({**ENDLESS, **HUGE}[name])
    with pytest.raises(UserError, match=str(path)) as caught:
        read_template(str(path))
    assert "CPU time" in caught.value.why or (name in HUGE and "memory" in caught.value.why)


def test_a_good_template_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('no') }}")
    assert read_template(str(path)) == path.read_text()
    monkeypatch.setattr(reader, "run_limited", None)  # a second trial would fail
    assert read_template(str(path)) == path.read_text()


def test_a_long_conversation_is_no_attack(base: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": "wörd 🙂 " * 500_000},
        {"role": "assistant", "content": "yes " * 500_000},
    ] * 2
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}"
    result = render_conversation(turns, replace(base, chat_template=template), whole=False)
    assert len(result.text) > 11_000_000
    assert [result.text[start : start + 4] for start, _ in result.spans] == ["yes "] * 2


def test_threads_render_the_same_template_at_the_same_time(base: Tokenizer) -> None:
    def turns(number: int) -> list[dict[str, str]]:
        return [{"role": role, "content": f"{role} {number}"} for role in ("user", "assistant")] * (
            1 + number % 7
        )

    def draw(number: int) -> Rendered:
        return render_conversation(turns(number), base, whole=False)

    with ThreadPoolExecutor(max_workers=4) as threads:
        assert list(threads.map(draw, range(200))) == [draw(number) for number in range(200)]


def test_values_arrive_as_they_were(base: Tokenizer) -> None:
    template = "{{ messages[0].content }}|{{ messages[0].name }}|{{ tools | tojson }}|{{ tools[0].n + 1 }}"
    turns = [{"role": "user", "content": "whole \0, \u2028, 日本 🙂", "name": date(2024, 2, 29)}]
    tools = [{"n": 2**70, "f": float("inf")}]
    text = render(turns, replace(base, chat_template=template), add_generation_prompt=False, tools=tools)
    assert text == (
        "whole \0, \u2028, 日本 🙂|2024-02-29|"
        '[{"n": 1180591620717411303424, "f": Infinity}]|1180591620717411303425'
    )


def test_values_that_are_nested_too_deeply_are_a_clear_error(base: Tokenizer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": deep}]
    with pytest.raises(UserError, match="nested too deeply"):
        render_conversation(turns, base, whole=False)
