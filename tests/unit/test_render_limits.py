"""A chat template that takes too much time, memory or text is stopped by the system, whatever it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import crosstune
from crosstune.core.errors import UserError
from crosstune.data.render_types import ChatTokens, Rendered, RenderRow
from crosstune.data.rendering import Renderer
from crosstune.data.template import make_environment
from crosstune.data.template_limits import Limits

FILE = "/models/some/chat_template.jinja"
CPU_S = 0.3
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def sixty_times(step: str) -> str:
    return (
        "{% set ns = namespace(s='y', l=['y'], n=3) %}{% for i in range(60) %}{% set "
        + step
        + " %}{% endfor %}"
    )


REFUSED = {
    "one huge range": "{% for a in range(999999999) %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "nested conditions": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "many digits": "{{ (7 ** 9999) | string }}",
    "long output": "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "much text in loops": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "a long template": "x" * 300_000,
    "our objects": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "our globals": "{{ raise_exception.__globals__.sys }}",
    "format to objects": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a file": "{% include '/etc/passwd' %}",
    "changing the input": "{{ messages.append(1) }}",
    "an unknown filter": "{{ 'x' | nothing }}",
    "random texts": "{{ ['a', 'b'] | random }}",
}
ENDLESS = {
    "a loop without output": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a list of lists": sixty_times("ns.l = [ns.l, ns.l]") + "{{ ns.l }}",
    "the same as JSON": sixty_times("ns.l = [ns.l, ns.l]") + "{{ ns.l | tojson }}",
    "the same, printed": sixty_times("ns.l = [ns.l, ns.l]") + "{{ ns.l | pprint }}",
    "a power": "{{ 9 ** 999999999 }}",
    "squares": sixty_times("ns.n = ns.n * ns.n"),
    "recursion in a tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters over long strings": "{{ (['a' * 1000000] * 100000) | map('upper') | map('length') | sum }}",
    "a sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "unique": "{% for i in range(99999) %}{{ (range(100000) | unique | list)[:0] }}{% endfor %}",
    "sort": "{% for i in range(99999) %}{{ (range(100000) | sort(reverse=true))[:0] }}{% endfor %}",
    "a search": "{% for i in range(99999) %}{{ ('a' * 9999999).count('b') }}{% endfor %}",
    "a long expression": "{{ " + "+".join(["1"] * 50_000) + " }}",
    "nested calls": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 50
    + "{% endcall %}" * 50,
}
HUGE = {
    "a product": "{{ 'x' * 9999999999 }}",
    "a product the other way": "{{ 9999999999 * 'x' }}",
    "a product of bytes": "{{ 'x'.encode() * 20000000000 }}",
    "doubling with +": sixty_times("ns.s = ns.s + ns.s"),
    "doubling with ~": sixty_times("ns.s = ns.s ~ ns.s"),
    "doubling with replace": sixty_times("ns.s = ns.s | replace('y', 'y' * 99)"),
    "doubling with .replace": sixty_times("ns.s = ns.s.replace('y', 'y' * 99)"),
    "doubling with join": sixty_times("ns.s = [ns.s, ns.s] | join"),
    "doubling a list": sixty_times("ns.l = ns.l + ns.l"),
    "a wide format": "{{ '{:>9999999999}'.format('x') }}",
    "a wide format inside": "{{ '{:>{w}}'.format('x', w=9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "padding": "{{ 'x'.ljust(20000000000) }}",
    "center": "{{ 'x' | center(20000000000) }}",
    "bytes of a number": "{{ (5).to_bytes(20000000000, 'big') }}",
    "a wide indent": "{{ 'x\ny' | indent(999999999) }}",
    "a wide JSON": "{{ messages | tojson(indent=999999999) }}",
    "a join of a generator": "{{ (['a' * 3000000] * 1000) | select | join }}",
    "captured output": "{% set x %}{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}",
    "an attribute": "{{ {'a': 'x' * 600000000} | xmlattr }}",
}


def behind_a_condition(template: str) -> str:
    return "{% if messages[0].content[:5] != 'Hello' %}" + template + "{% endif %}"


def render_once(template: str, *, limits: Limits) -> Rendered | UserError:
    renderer = Renderer(limits)
    row = RenderRow.of(TURNS, kind="answers")
    try:
        [result] = renderer.render_rows([row], ChatTokens(chat_template=template, template_file=FILE))
    finally:
        renderer.close()
    return result


@pytest.mark.parametrize("name", [*REFUSED, *ENDLESS, *HUGE])
def test_a_hostile_template_is_stopped(name: str) -> None:
    """The limits are those of CPU time and memory, so that nothing here depends on how busy the machine is."""
    template = behind_a_condition({**REFUSED, **ENDLESS, **HUGE}[name])
    used = os.times()
    result = render_once(template, limits=Limits(cpu_s=CPU_S, memory_bytes=192 << 20))
    assert isinstance(result, UserError)
    assert FILE in result.asked
    if name in ENDLESS:
        assert "CPU time" in result.why
    if name in HUGE:
        assert "memory" in result.why or "CPU time" in result.why
    now = os.times()
    spent = now.children_user + now.children_system - used.children_user - used.children_system
    assert spent < CPU_S + 30  # and what starting an interpreter takes


@pytest.mark.parametrize("name", ["padding", "bytes of a number", "a product"])
def test_one_call_cannot_take_more_memory_than_the_default(name: str) -> None:
    result = render_once(HUGE[name], limits=Limits())
    assert isinstance(result, UserError)
    assert result.why == "it takes more than 512 MiB of memory"


def test_a_long_conversation_is_no_attack() -> None:
    turns = [
        {"role": "user", "content": "wörd 🙂 " * 500_000},
        {"role": "assistant", "content": "yes " * 500_000},
    ] * 2
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}"
    renderer = Renderer()
    tokens = ChatTokens(chat_template=template, template_file=FILE, special=("</s>",))
    [result] = renderer.render_rows([RenderRow.of(turns, kind="answers")], tokens)
    renderer.close()
    assert isinstance(result, Rendered)
    assert len(result.text) > 11_000_000
    assert [result.text[start : start + 4] for start, _ in result.spans] == ["yes "] * 2


def test_there_is_one_sandbox_and_one_process_that_renders() -> None:
    """A second place that renders would be one without the limits."""
    package = Path(crosstune.__file__).parent
    texts = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    assert {name for name, text in texts.items() if "SandboxedEnvironment" in text} == {"data/template.py"}
    users = {name for name, text in texts.items() if "data.template import" in text}
    assert users == {"data/chat.py"}
    users = {name for name, text in texts.items() if "data.chat import" in text}
    assert users == {"data/render_worker.py"}


def test_templates_cannot_write_another_text_each_time() -> None:
    environment = make_environment()
    assert "random" not in environment.filters
    assert "lipsum" not in environment.globals
