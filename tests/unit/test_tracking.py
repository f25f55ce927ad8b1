"""The values that trackers get; no tracker can stop or slow a run, or leak its secrets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tracked import RECORDING, Seen, notes, planted

from crosstune.config.conditions import screen_in, trackers_in
from crosstune.config.load import load_config, make_config
from crosstune.config.schema import Config
from crosstune.core.errors import ConfigError, UserError
from crosstune.core.events import Evaluated, StepMetrics, Stopped
from crosstune.files.run_record import RunRecord
from crosstune.machines.probe import load_machine
from crosstune.planner.gather import make_plan
from crosstune.tracking import observe
from crosstune.tracking.observe import Tracking, check_trackers
from crosstune.tracking.tracker import TrackingFailed, TrackingStarted, TrackingWaits
from crosstune.tracking.values import table_rows, tracked_config

SECRET = "0123456789abcdef0123456789abcdef01234567"
RAISES = RECORDING.replace('self.note(do="log"', 'raise OSError(28, "No space left"); self.note(do="log"')
HANGS = RECORDING.replace('self.note(do="log"', 'import time; time.sleep(1000); self.note(do="log"')
DIES = RECORDING.replace('self.note(do="log"', 'raise SystemExit(3); self.note(do="log"')
ASKS = RECORDING.replace('self.note(do="log"', 'input("key: "); self.note(do="log"')
TELLS = RECORDING.replace('self.note(do="log"', f'raise ValueError("{SECRET} is wrong"); self.note(do="log"')
PRINTS = RECORDING.replace('self.note(do="log"', 'print("x", flush=True); self.note(do="log"')
MISSING = RECORDING.replace('PACKAGE = "json"', 'PACKAGE = "no_such_package_xyz"')
CODES = {"notes": RECORDING, "raises": RAISES, "hangs": HANGS, "dies": DIES, "asks": ASKS, "tells": TELLS}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to start a tracker than a user would wait for it."""
    monkeypatch.setattr(observe, "WAIT_S", 900.0)
    monkeypatch.setattr(observe, "STOPPED_WAIT_S", 900.0)


@pytest.fixture(autouse=True, scope="module")
def trackers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with planted(tmp_path_factory.mktemp("planted"), **CODES, prints=PRINTS, missing=MISSING):
        yield


def step_row(step: int, **values: Any) -> StepMetrics:
    row = {"step": step, "loss": 1 / step, "tokens": 10, "lr": 1e-4, "grad_norm": None, "tokens_per_s": 3.5}
    return cast(StepMetrics, row | values)


def config_for(*names: str, **options: Any) -> Config:
    return make_config(log_to=",".join(names), **options)


def follow(
    run: Path, *names: str, steps: int = 3, resumes_at: int = 0, status: str = "finished", **options: Any
) -> Seen:
    """Track a run of a few steps without any training."""
    run.mkdir(exist_ok=True)
    seen = Seen()
    with Tracking() as tracking:
        tracking.start(
            config_for(*names, **options),
            {"options": {"lr": 1e-4}},
            folder=run,
            report=seen,
            in_place=resumes_at > 0,
            resumes_at=resumes_at,
            earlier=run if resumes_at else None,
        )
        for step in range(resumes_at + 1, steps + 1):
            tracking.on_step(step_row(step))
        tracking.summarize({"status": status, "steps": steps})
    return seen


def test_a_tracker_gets_everything_in_order(tmp_path: Path) -> None:
    run, seen = tmp_path / "läufe", Seen()
    run.mkdir()
    sample = {"prompt": "a|b\u2028", "answer": f"half \ud800 {SECRET}", "reference": "hf_" + "aB3dE" * 7}
    with Tracking() as tracking:
        tracking.start(config_for("notes", tracker_group="g"), {}, folder=run, report=seen)
        tracking.on_event(Evaluated(step=0, when="before", metrics={"loss": math.nan}, samples=[], seconds=1))
        tracking.on_step(step_row(1, skipped=True, loss=None))
        metrics = {"loss": 0.1 + 0.2, "pearson": -math.inf}
        tracking.on_event(
            Evaluated(step=1, when="after", metrics=metrics, samples=[cast(Any, sample)], seconds=1)
        )
        tracking.on_event(Stopped(reason="x", step=1, num_steps=2))
        tracking.log_test({"pearson": 0.5, "note": "text"}, [{"id": "7", "score": 3}])
        tracking.summarize({"status": "finished", "eval": math.nan, "path": "\udc80"})
    rows = notes(run)
    assert [row["do"] for row in rows] == ["start", "log", "log", "log", "rows", "log", "rows", "finish"]
    assert (rows[0]["name"], rows[0]["project"], rows[0]["group"]) == ("läufe", "crosstune", "g")
    assert math.isnan(rows[1]["values"]["eval/loss"]) and rows[1]["step"] == 0
    assert rows[2]["values"] == {
        "train/tokens": 10,
        "train/lr": 1e-4,
        "train/tokens_per_s": 3.5,
        "train/skipped": 1,
    }
    assert rows[3]["values"] == {f"eval/{name}": value for name, value in metrics.items()}
    assert rows[4]["name"] == "eval/samples"
    [shown] = rows[4]["rows"]
    assert shown["prompt"] == "a|b\u2028" and "?" in shown["answer"] and shown["reference"] == "[secret]"
    assert rows[5] == {"do": "log", "step": 1, "values": {"test/pearson": 0.5}}
    assert rows[6]["rows"] == [{"id": "7", "score": 3}] and rows[6]["name"] == "test/worst"
    assert rows[7] == {
        "do": "finish",
        "summary": {"status": "finished", "eval": None, "path": "?"},
        "succeeded": True,
    }
    [started] = seen.of(TrackingStarted)
    assert started.where == str(run / "notes.notes") and seen.of(TrackingFailed) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [("raises", "OSError: [Errno 28] No space left"), ("dies", "SystemExit: 3"), ("asks", "EOFError")],
)
def test_one_that_fails_is_reported_once_and_the_others_go_on(name: str, says: str, tmp_path: Path) -> None:
    seen = follow(tmp_path / "run", name, "notes")
    [failed] = seen.of(TrackingFailed)
    assert failed.tracker == name and says in failed.error
    assert [row["step"] for row in notes(tmp_path / "run", do="log")] == [1, 2, 3]


def test_one_that_hangs_is_left_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "WAIT_S", 1.0)
    monkeypatch.setattr(observe, "QUIET_S", 0.1)
    seen = follow(tmp_path / "run", "hangs")
    [failed] = seen.of(TrackingFailed)
    assert failed.error == "it did not finish within 1 s"
    monkeypatch.setattr(observe, "STOPPED_WAIT_S", 0.2)
    stopped = follow(tmp_path / "stopped", "hangs", status="stopped")
    assert [event.error for event in stopped.of(TrackingFailed)] == ["it did not finish within 0.2 s"]
    [waits] = seen.of(TrackingWaits)
    assert list(waits.trackers) == ["hangs"]


def test_a_call_over_its_limit_ends_the_tracker_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; the queue holds nothing of it afterwards, and the end does not wait for it."""
    monkeypatch.setattr(observe, "CALL_S", 2.0)  # `notes` answers in time on a busy machine too
    monkeypatch.setattr(observe, "MAX_QUEUED", 100)
    (tmp_path / "run").mkdir()
    seen = Seen()
    with Tracking() as tracking:
        tracking.start(config_for("hangs", "notes"), {}, folder=tmp_path / "run", report=seen)
        step = 0
        while not seen.of(TrackingFailed):
            step += 1
            tracking.on_step(step_row(step))
            time.sleep(0.05)
        for later in range(step + 1, step + 4):
            tracking.on_step(step_row(later))
        tracking.summarize({"status": "finished"})
        ends = time.monotonic()
    assert time.monotonic() - ends < 300  # not the 900 s for one that hangs
    [failed] = seen.of(TrackingFailed)
    assert (failed.tracker, failed.error) == ("hangs", "it did not answer within 2 s")
    assert [row["step"] for row in notes(tmp_path / "run", do="log")] == list(range(1, step + 4))


def test_a_process_ends_although_a_tracker_hangs(tmp_path: Path) -> None:
    """Also with a thread of its own that Python would join at exit."""
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
from tracked import RECORDING, Seen, planted
from crosstune.cli import main; from crosstune.cli.commands import options
from crosstune.config.load import make_config
from crosstune.tracking import observe
HANGS = RECORDING.replace('self.note(do="log"', '''
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        time.sleep(1000)
        self.note(do="log"''')
run = Path({str(tmp_path / "run")!r})
run.mkdir()
observe.WAIT_S = observe.STOPPED_WAIT_S = 0.5
def train(words):
    with planted(Path({str(tmp_path / "more")!r}), hangs=HANGS), observe.Tracking() as tracking:
        tracking.start(make_config(log_to="hangs"), {{}}, folder=run, report=Seen())
        tracking.on_step({{"step": 1, "loss": 1.0}})
    return 7
options.run = train
sys.argv[1:] = ["options"]
sys.exit(main.main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 7


def test_a_slow_one_gets_every_value_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What found no room in the queue is read from the run folder later, in order and once."""
    monkeypatch.setattr(observe, "MAX_QUEUED", 10)
    run = tmp_path / "run"
    run.mkdir()
    record = RunRecord.create(run, config_yaml="", plan={})
    seen = Seen()
    with Tracking() as tracking:
        tracking.start(config_for("notes"), {}, folder=run, report=seen)
        for step in range(1, 501):
            for observer in (record, tracking):
                observer.on_step(step_row(step))
            if step == 300:
                sample = {"prompt": "p", "answer": "a", "reference": "r"}
                done = Evaluated(
                    step=step, when="during", metrics={"loss": 2.0}, samples=[cast(Any, sample)], seconds=1
                )
                for observer in (record, tracking):
                    observer.on_event(done)
        tracking.summarize({"status": "finished"})
    rows = notes(run)
    assert [row["step"] for row in rows if row["do"] == "log"] == [*range(1, 301), *range(300, 501)]
    assert [row["rows"] for row in rows if row["do"] == "rows"] == [[sample]]
    assert rows[-1]["do"] == "finish" and seen.of(TrackingFailed) == []


def test_a_key_in_an_error_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    [failed] = follow(tmp_path / "run", "tells").of(TrackingFailed)
    assert failed.error == "ValueError: [secret] is wrong"


def test_a_resumed_run_goes_on_with_the_same_id(tmp_path: Path) -> None:
    """Killed after step 5 of which the tracker has 4, resumed at 3: nothing twice, nothing missing."""
    run = tmp_path / "run"
    follow(run, "notes", steps=4)
    lines = [json.dumps(dict(step_row(step))) for step in (1, 2, 3, 4, 5)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    follow(run, "notes", steps=7, resumes_at=3)
    first, second = notes(run, do="start")
    assert (first["continues"], second["continues"], second["resumes_at"]) == (False, True, 3)
    assert first["id"] == second["id"]
    assert [row["step"] for row in notes(run, do="log")] == [1, 2, 3, 4, 5, 6, 7]
    follow(run, "notes", steps=8, resumes_at=7, project_name="other")
    third = notes(run, do="start")[-1]
    assert third["id"] != first["id"] and third["continues"] is False


def test_a_tracker_that_comes_later_gets_the_earlier_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [dict(step_row(step)) for step in (1, 2, 3, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {"kind": "evaluation", "step": 2, "metrics": {"loss": 0.5}}
    (run / "events.jsonl").write_text(json.dumps(evaluation) + "\n")
    follow(run, "notes", steps=4, resumes_at=3)
    logged = notes(run, do="log")
    assert [row["step"] for row in logged] == [1, 2, 2, 3, 4]
    assert logged[2]["values"] == {"eval/loss": 0.5}
    assert [row["values"]["train/loss"] for row in (*logged[:2], *logged[3:])] == [1, 1 / 2, 1 / 3, 1 / 4]


def test_a_missing_package_is_named_before_the_start() -> None:
    with pytest.raises(UserError) as error:
        check_trackers(config_for("notes", "missing"))
    assert "not installed: no_such_package_xyz" in str(error.value)
    assert "pip install no_such_package_xyz" in error.value.do and "crosstune[track]" in error.value.do


def test_the_configuration_that_is_sent() -> None:
    described = {
        "options": {"lr": 1e-4, "dataset": "https://me:pass@host/x"},
        "machine": {"name": "my-host", "versions": {"torch": "2"}},
        "command": ["crosstune", "train"],
        "model": {"name": "m", "path": "/home/me/m"},
        "data": {"dataset": "d", "train": {"examples": 3}, "notes": ["private"]},
    }
    sent = tracked_config(described)
    text = json.dumps(sent)
    assert sent["options"]["lr"] == 1e-4 and sent["versions"] == {"torch": "2"}
    for hidden in ("my-host", "pass", "/home/me", "private", "command"):
        assert hidden not in text


def test_tables_are_bounded() -> None:
    rows = table_rows([{"a": "x" * 50_000, "frames": ["1", "2"]}] * 300)
    assert len(rows) == 200 and len(rows[0]["a"]) < 4010 and rows[0]["frames"] == "1\n2"
    [row] = table_rows([{"a": "x " * 1990 + "hf_" + "aB3dE" * 70}])
    assert "aB3dE" not in row["a"]


@pytest.mark.parametrize(
    ("value", "screen", "trackers"),
    [
        ("tqdm", "tqdm", []),
        ("wandb", "tqdm", ["wandb"]),
        ("stdout, wandb,weave", "stdout", ["wandb", "weave"]),
        ("none", "tqdm", []),
    ],
)
def test_log_to_names_the_screen_and_trackers(value: str, screen: str, trackers: list[str]) -> None:
    config = load_config(["--log_to", value], environment={})
    assert (screen_in(config.log_to), trackers_in(config.log_to)) == (screen, trackers)
    assert load_config(["--report_to", value], environment={}).log_to == value


@pytest.mark.parametrize("value", ["wandbb", "tqdm,stdout", "none,wandb", ",", "no_such_tracker"])
def test_other_targets_are_refused(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["--log_to", value], environment={})
    assert "log_to cannot be" in str(error.value)
    if value == "wandbb":
        assert "did you mean wandb" in str(error.value)


@pytest.mark.parametrize(
    ("variables", "netrc", "asked", "log_to"),
    [
        ({}, "", {"project_name": "p"}, "tqdm"),
        ({"WANDB_MODE": "offline"}, "", {"project_name": "p"}, "tqdm,wandb"),
        ({"WANDB_API_KEY": "k"}, "", {"project_name": "p"}, "tqdm,wandb"),
        ({"WANDB_API_KEY": "k"}, "", {"project_name": "p", "log_to": "stdout"}, "stdout"),
        ({"WANDB_API_KEY": "k"}, "", {}, "tqdm"),
        ({}, "machine api.wandb.ai login user password k", {"project_name": "p"}, "tqdm,wandb"),
        ({}, "machine example.org login user password k", {"project_name": "p"}, "tqdm"),
        ({}, "not a netrc", {"project_name": "p"}, "tqdm"),
    ],
)
def test_a_project_implies_the_tracker_that_is_set_up(
    variables: dict[str, str],
    netrc: str,
    asked: dict[str, str],
    log_to: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(make_config(backend="cpu", **asked), machine=load_machine("cpu-laptop"))
    assert plan.config.log_to == log_to
