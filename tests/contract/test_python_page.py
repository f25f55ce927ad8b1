"""Run the examples of docs/guide/python.md as written, in order, and type-check them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

from crosstune.models.tiny import tiny_model

pytestmark = pytest.mark.slow
BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8"), re.S
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The things that a reader has: a model, a file of chats, and the examples as one program."""
    folder = tmp_path_factory.mktemp("python")
    tiny_model(folder / "my-model")
    row = '{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}\n'
    (folder / "chats.jsonl").write_text(row * 24)
    (folder / "examples.py").write_text("\n".join(BLOCKS), encoding="utf-8")
    return folder


def run(home: Path, *words: str, code: int = 0) -> str:
    environment = os.environ | {"CROSSTUNE_CACHE": str(home / "cache"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_examples_run(home: Path) -> None:
    printed = run(home, "examples.py").splitlines()
    assert printed[0].startswith("finished ")
    assert "stopped a callback 1" in printed
    [watched] = [place for place, line in enumerate(printed) if line.startswith("stopped evaluation loss")]
    assert "finished" in printed[watched:]
    assert any(line.startswith("machine ") for line in printed)
    assert any(re.fullmatch(r"\(\d+, 512\)", line) for line in printed)


FOREIGN = "torch transformers numpy mlx mlx_lm datasets safetensors tokenizers huggingface_hub rich"
INNER = "backends checkpoint data distributed estimate loop mlx_engine models planner recipes runs torch_engine tracking"
USER_PROGRAM = """
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crosstune
from crosstune import Callback, Model, PlanReport, Run, load, plan, train


def every_step(metrics: Mapping[str, Any]) -> object:
    return crosstune.STOP


def also(metrics: dict[str, Any]) -> None: ...


callbacks: list[Callback] = [every_step, also, print]
rows = [{"prompt": "a", "completion": "b"}]
run: Run = train(model_name=Path("x"), dataset=rows, lr=1e-4, lora_target_modules=["q_proj"], callbacks=callbacks)
splits: Run = train(dataset={"train": rows, "test": rows}, eval_dataset=rows, tokenizer="folder", resume=None)
report: PlanReport = plan(model_name="x", machine="apple-m1-16gb", packing=True)
model: Model = run.load()
one: str = model.generate("a")
many: list[str] = model.generate(["a", "b"])
folder: Path = model.merge("out")
problems: list[str] = [problem.message for problem in report.problems]
"""


def test_a_program_passes_a_type_checker(home: Path) -> None:
    pytest.importorskip("mypy")
    (home / "user_program.py").write_text(USER_PROGRAM)
    (home / "wrong.py").write_text("import crosstune\ncrosstune.train(callbacks=3)\ncrosstune.nothing\n")
    # A program sees no type of the frameworks or of these rooms through crosstune, and reading them is slow.
    skipped = [*FOREIGN.split(), *(f"crosstune.{room}" for room in INNER.split())]
    sections = ",".join(f"{name}.*" for name in skipped)
    (home / "mypy.ini").write_text(f"[mypy]\n[mypy-{sections}]\nfollow_imports = skip\n")
    flags = ["--strict", "--follow-imports=silent", "--cache-dir", os.devnull]
    said = run(home, "-m", "mypy", *flags, "user_program.py", "wrong.py", code=1)
    assert 'Argument "callbacks"' in said and "nothing" in said
    assert "user_program.py:" not in said
