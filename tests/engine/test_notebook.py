"""Runs and plans in a notebook: what a kernel displays, escaped, and progress that is updated in place."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.api.notebook import LiveCell, framed, has_kernel, loss_curves, table
from crosstune.core.events import Evaluated

CELLS = """
from crosstune import Run, plan, train
rows = [{"prompt": f"say {n}", "completion": f"{n} <script>"} for n in range(40)]
options = dict(model_name="tiny-random", dataset=rows, backend="cpu", precision="fp32", max_steps=6, batch_size=4)
plan(**options, name="n<i>")
#
run = train(**options, eval_steps=2, eval_samples=4, num_samples=1, max_new_tokens=2, name="n<i>")
#
Run("runs/n<i>")
#
train(**options, skip_eval=True, name="quiet", progress=False)
"""


@pytest.mark.slow
def test_a_kernel_displays_runs_plans_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no Jupyter kernel here; pip install 'crosstune[test]' brings one"
    nbclient, nbformat = (pytest.importorskip(name, reason=reason) for name in ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel", reason=reason)
    for name in (
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "CROSSTUNE_CACHE",
    ):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS.split("#\n")]
    updates: list[dict[str, Any]] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                updates.append(msg)
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=cells)
    Client(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    planned, trained, opened, quiet = notebook.cells
    [shown] = [each["data"]["text/html"] for each in planned["outputs"] if "data" in each]
    assert shown.startswith("<table>") and "tiny-random" in shown

    assert [msg["msg_type"] for msg in updates].count("display_data") == 1
    assert len({msg["content"]["transient"]["display_id"] for msg in updates}) == 1 < len(updates)
    texts = [msg["content"]["data"]["text/html"] for msg in updates]
    assert "<progress" in texts[0] and any("evaluating step" in text for text in texts)
    [last] = [each["data"]["text/html"] for each in trained["outputs"] if "data" in each]
    assert last == texts[-1] and "<progress" not in last and "over 6 steps" in last
    printed = "".join(each["text"] for each in trained["outputs"] if each["output_type"] == "stream")
    assert "\x1b[2K" not in printed and "step 6/6" not in printed, (
        "no bar of a terminal, no line for each step"
    )

    [cell] = opened["outputs"]
    frame = cell["data"]["text/html"]
    assert frame.startswith('<iframe sandbox="allow-scripts"') and "<svg" not in frame
    page = html.unescape(frame)
    assert (
        'class="plot"' in page and "Evaluation loss" in page and "n&lt;i&gt;" in page and "n<i>" not in page
    )
    assert cell["data"]["text/plain"].startswith("Run(")
    assert [each["output_type"] for each in quiet["outputs"]] == ["execute_result"]


def test_text_of_a_run_or_a_plan_is_not_markup() -> None:
    assert framed('"><script>').count("<") == 2, "the frame and its end"
    shown = table(["model        <b>x</b>\x1b[1m", "chosen       lr: 1"], width=12)
    assert "<b>" not in shown and "\x1b" not in shown and shown.count("<tr>") == 2


def test_the_live_curves_hold_at_any_loss() -> None:
    assert loss_curves([], [(0, 3.0)]) == loss_curves([(1, 2.0)], []) == ""
    assert "nan" not in loss_curves([(1, 2.0), (2, 2.0)], [])
    drawn = loss_curves([(step, 5.0 / step) for step in range(1, 5000)], [(0, 6.0), (4999, 2.0)])
    assert "evaluation 2" in drawn and len(drawn) < 20_000
    cell = LiveCell()
    cell.on_event(Evaluated(step=0, when="before", metrics={"loss": float("nan")}, samples=(), seconds=0.0))
    for step, loss in enumerate((2.0, None, float("inf"), 1.0), start=1):
        cell.on_step({"step": step, "loss": loss})  # type: ignore[typeddict-item]
    assert "nan" not in loss_curves(cell.losses, cell.evaluated)


def test_without_a_kernel_nothing_of_ipython_is_imported() -> None:
    assert not has_kernel()
    code = "import sys; from crosstune.api.notebook import has_kernel; assert not has_kernel(); "
    code += "import crosstune.api.train; assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
