"""Follow docs/internals/add-a-backend.md: save its file into a copy of the package, run its commands."""

from __future__ import annotations

import json

import pytest
from pages import Followed, Page, Workshop

pytestmark = pytest.mark.slow

PAGE = Page("add-a-backend.md")


def test_doctor_probes_it_and_trains_on_it(shop: Workshop, followed: Followed) -> None:
    assert "training 3 steps on cpu2" in followed[0]
    machine = shop.json("machine.json")
    one, other = machine["backends"]["cpu"], machine["backends"]["cpu2"]
    assert other["available"] and other["dtypes"] == one["dtypes"]
    [check] = [check for check in machine["checks"] if check["backend"] == "cpu2"]
    assert check["agrees"] and check["difference"] == 0


def test_it_is_planned_here_and_from_a_report(followed: Followed) -> None:
    assert "cpu2" in followed[1] and "cpu2" in followed[2]


def test_the_loss_falls_and_the_run_goes_on_elsewhere(shop: Workshop, followed: Followed) -> None:
    assert "finished 20 steps" in followed[3] and "resumed  at step 20" in followed[4]
    rows = shop.metrics("second")
    assert len(rows) == 20 and rows[-1]["loss"] < rows[0]["loss"]
    assert shop.json("runs/second/plan.json")["backend"] == "cpu2"
    assert shop.json("runs/first/plan.json")["backend"] == "cpu"
    assert [row["step"] for row in shop.metrics("first")][-5:] == list(range(21, 26))


def test_it_is_planned_as_the_device_it_is(shop: Workshop, followed: Followed) -> None:
    """The kind of device decides, not the name of the backend."""

    def plan(backend: str) -> dict[str, object]:
        asked = f"--backend {backend} --model_name tiny-random --optimizer fused_adamw --train_type qlora"
        out = shop.run(f"plan --machine machine.json {asked} --json")
        out = out[out.index("{") :]  # after the line on standard error
        assert json.loads(out)["backend"] == backend
        found = json.loads(out.replace(backend, "cpu"))
        return {
            name: found[name]
            for name in ("device", "method", "precision", "world_size", "collective", "adjustments")
        }

    assert "cpu2" in followed[0]
    assert plan("cpu2") == plan("cpu")
