"""The process that renders chat templates: which row fails, what ends it, what it inherits, and its replacement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from crosstune.core.errors import UserError
from crosstune.data.corpus import open_corpus
from crosstune.data.render_ahead import render_ahead
from crosstune.data.render_process import Stopped
from crosstune.data.render_types import ChatTokens, Rendered, RenderRow
from crosstune.data.rendering import Renderer, render, render_conversation
from crosstune.data.sources import open_source
from crosstune.data.template_limits import Limits
from crosstune.data.tokenizer import Tokenizer

ECHO = ChatTokens(chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
TRAPS = ChatTokens(
    chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if m.content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif m.content == 'fill' %}{{ 'x'.ljust(20000000000) }}"
    "{% elif m.content == 'raise' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
    template_file="/models/some/chat_template.jinja",
)
QUICK = Limits(cpu_s=0.3)


def row(content: str, *, kind: str = "text") -> RenderRow:
    return RenderRow.of([{"role": "user", "content": content}], kind=kind)


def texts(results: list[Rendered | UserError]) -> list[str]:
    return [result.text if isinstance(result, Rendered) else "" for result in results]


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer(QUICK)
    yield made
    made.close()


def pid_of(renderer: Renderer) -> int:
    assert renderer._process is not None
    return renderer._process._child.pid


def run_script(code: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with a renderer and a row at hand."""
    start = (
        "import os, signal, sys, threading\n"
        "from crosstune.data.rendering import Renderer, render, shared_renderer\n"
        "from crosstune.data.render_types import ChatTokens, RenderRow\n"
        "from crosstune.data.template_limits import Limits\n"
        "row = RenderRow.of([{'role': 'user', 'content': 'Hello'}], kind='text')\n"
        "echo = ChatTokens(chat_template='{{ messages[0].content }}')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **settings,
    )


@pytest.mark.parametrize(
    ("content", "limit"), [("loop", "0.3 s of CPU time"), ("fill", "512 MiB of memory"), ("raise", "no")]
)
def test_the_row_that_fails_is_found_in_its_batch(renderer: Renderer, content: str, limit: str) -> None:
    rows = [row(f"row {number}") for number in range(60)]
    rows[37] = row(content)
    results = renderer.render_rows(rows, TRAPS)
    assert texts(results[:-1]) == [f"user: row {number}\n" for number in range(37)]
    [failed] = results[37:]
    assert isinstance(failed, UserError)
    assert TRAPS.template_file in failed.asked
    assert limit in failed.why
    assert texts(renderer.render_rows(rows[:2], TRAPS)) == ["user: row 0\n", "user: row 1\n"]


def test_the_error_names_file_line_template_and_limit(
    tiny_model: Path, tmp_path: Path, write_jsonl: Any
) -> None:
    import shutil

    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(str(TRAPS.chat_template))
    contents = ["a", "b", "fill", "d"]
    path = write_jsonl(
        [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
            for text in contents
        ]
    )
    with pytest.raises(UserError) as caught:
        open_corpus(
            open_source(str(path)),
            Tokenizer.from_folder(model),
            asked_format="auto",
            whole=False,
            context_length=512,
            truncation="error",
        )
    assert caught.value.asked.startswith(f"{path}, line 3: The chat template {model / 'chat_template.jinja'}")
    assert "512 MiB of memory" in caught.value.why


def test_the_first_bad_row_is_reported_though_a_later_one_is_read_before(renderer: Renderer) -> None:
    def rows(*contents: str) -> Iterator[tuple[str, RenderRow]]:
        for content in contents:
            yield content, row(content)
        raise UserError("the last row cannot be read")

    with closing(render_ahead(rows("a", "raise", "b"), TRAPS, renderer=renderer)) as results:
        assert [(content, type(result)) for content, result in results if content != "a"] == [
            ("raise", UserError)
        ]
    done = []
    with pytest.raises(UserError, match="the last row"):
        done += [content for content, _ in render_ahead(rows("a", "b"), TRAPS, renderer=renderer)]


@pytest.mark.parametrize("num_good", [0, 1, 3, 4])
def test_a_row_that_cannot_be_read_is_an_error_wherever_a_batch_ends(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    monkeypatch.setattr("crosstune.data.render_ahead.BATCH_TEXTS", 2)

    def rows() -> Iterator[tuple[int, RenderRow]]:
        for number in range(num_good):
            yield number, row(f"row {number}")
        raise UserError("the next row cannot be read")

    done: list[int] = []
    with pytest.raises(UserError, match="the next row"):
        for place, _ in render_ahead(rows(), ECHO, renderer=renderer):
            done.append(place)
    assert done == list(range(num_good))


def test_many_batches_come_in_order(renderer: Renderer) -> None:
    rows = ((number, row(f"{number} " + "x" * (number % 997))) for number in range(3000))
    done = list(render_ahead(rows, ECHO, renderer=renderer))
    assert [place for place, _ in done] == list(range(3000))
    for place, result in done:
        assert isinstance(result, Rendered)
        assert result.text.startswith(f"user: {place} ")


def test_a_reply_that_is_too_long_is_sent_in_parts(renderer: Renderer) -> None:
    rows = [row(str(number) + "x" * 3_000_000) for number in range(24)]
    results = renderer.render_rows(rows, ECHO)
    assert [text[:8] for text in texts(results)] == [
        f"user: {number}"[:8].ljust(8, "x") for number in range(24)
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_was_killed_is_replaced(renderer: Renderer, number: int) -> None:
    assert texts(renderer.render_rows([row("a")], ECHO)) == ["user: a\n"]
    first = pid_of(renderer)
    os.kill(first, number)
    assert texts(renderer.render_rows([row("b"), row("c")], ECHO)) == ["user: b\n", "user: c\n"]
    assert pid_of(renderer) != first


def test_signals_for_the_run_do_not_end_it(renderer: Renderer) -> None:
    """A job scheduler signals every process; and the run may still render after it."""
    renderer.render_rows([row("a")], ECHO)
    first = pid_of(renderer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(first, number)
    assert texts(renderer.render_rows([row("b")], ECHO)) == ["user: b\n"]
    assert pid_of(renderer) == first
    assert os.getsid(first) != os.getsid(0)  # a terminal's Ctrl-C does not even reach it


def test_another_thread_can_end_a_rendering() -> None:
    renderer, stop = Renderer(), threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    with pytest.raises(Stopped):
        renderer.render_rows([row("loop")], TRAPS, stop=stop)
    assert texts(renderer.render_rows([row("a")], TRAPS)) == ["user: a\n"]
    renderer.close()


def test_an_interrupt_ends_the_rendering_at_once() -> None:
    """The limit is an hour here: the script ends because the rendering does."""
    done = run_script(
        "from crosstune.data.render_ahead import render_ahead\n"
        "loop = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    list(render_ahead([(0, row)], ChatTokens(chat_template=loop), renderer=Renderer(Limits(cpu_s=3600))))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


def wait_for_end(pid: int) -> None:
    """Wait for a process that is not our child; a zombie that nobody reads the status of has ended too."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_it_does_not_outlive_its_parent(busy: bool) -> None:
    """An idle process ends with its input, a busy one by its limit of CPU time."""
    done = run_script(
        "made = Renderer(Limits(cpu_s=1))\n"
        "made.render_rows([row], echo)\n"
        "print(made._process._child.pid, flush=True)\n"
        "loop = ChatTokens(chat_template='{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}')\n"
        + ("threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()\nmade.render_rows([row], loop)\n" * busy)
        + "os.kill(os.getpid(), 9)\n"
    )
    assert done.returncode == -9
    wait_for_end(int(done.stdout))


def test_it_inherits_no_secret_and_no_core_dump(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    renderer.render_rows([row("a")], ECHO)
    process = psutil.Process(pid_of(renderer))
    assert "HF_TOKEN" not in process.environ()
    assert not process.environ().keys() - {
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "LC_CTYPE",
        "__CF_USER_TEXT_ENCODING",
    }
    assert process.cwd() == "/"
    if sys.platform.startswith("linux"):
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_AS)[0] < 2 << 30


def test_it_imports_little() -> None:
    code = "import sys, crosstune.data.render_worker; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jinja2" in loaded
    assert not loaded & {"numpy", "tokenizers", "torch", "psutil", "rich", "multiprocessing", "socket"}


def test_a_fork_gets_a_process_of_its_own() -> None:
    done = run_script(
        "shared_renderer().render_rows([row], echo)\n"
        "first = shared_renderer()._process._child.pid\n"
        "child = os.fork()\n"
        "shared_renderer().render_rows([row], echo)\n"
        "same = shared_renderer()._process._child.pid == first\n"
        "if child == 0:\n"
        "    print('child', same, flush=True)\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "text = shared_renderer().render_rows([row], echo)[0].text\n"
        "print('parent', same and shared_renderer()._process._child.pid == first, text)\n"
    )
    assert done.stdout.split("\n")[:2] == ["child False", "parent True Hello"], done.stderr


def test_few_files_are_enough_and_too_few_are_a_clear_error() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))\n"
    asks = "print(shared_renderer().render_rows([row], echo)[0].text)\n"
    done = run_script(limited.format(24) + asks)
    assert done.stdout == "Hello\n", done.stderr
    done = run_script(limited.format(5) + asks)
    assert "cannot be started" in done.stderr
    assert "Too many open files" in done.stderr


def test_a_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import crosstune.data.render_process as module

    monkeypatch.setattr(module, "_PACKAGES", ("crosstune",))
    monkeypatch.setattr(module, "_package_parent", lambda name: Path("/nowhere"))
    with pytest.raises(UserError, match="No module named 'crosstune'"):
        Renderer().render_rows([row("a")], ECHO)


def test_values_arrive_as_they_were(tiny_model: Path) -> None:
    from dataclasses import replace
    from datetime import date

    base = Tokenizer.from_folder(tiny_model)
    template = "{{ messages[0].content }}|{{ messages[0].name }}|{{ tools | tojson }}|{{ tools[0].n + 1 }}"
    tokenizer = replace(base, chat_template=template)
    turns = [{"role": "user", "content": "whole \0, \u2028, 日本 🙂", "name": date(2024, 2, 29)}]
    text = render(turns, tokenizer, add_generation_prompt=False, tools=[{"n": 2**70, "f": float("inf")}])
    assert text == (
        "whole \0, \u2028, 日本 🙂|2024-02-29|"
        '[{"n": 1180591620717411303424, "f": Infinity}]|1180591620717411303425'
    )


def test_values_that_are_nested_too_deeply_are_a_clear_error(tiny_model: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": deep}]
    with pytest.raises(UserError, match="nested too deeply"):
        render_conversation(turns, Tokenizer.from_folder(tiny_model), whole=False)
