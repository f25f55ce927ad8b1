"""The real trackers: train, break, resume, and read the values back with each tracker's own reader.

Weave has no files of its own and no offline mode: its client talks to a server of this test, which keeps the requests.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import secrets
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat
from tracked import Seen

from crosstune.config.load import make_config
from crosstune.core.events import StepMetrics
from crosstune.files.json_files import read_jsonl
from crosstune.runs.pipeline import train
from crosstune.tracking import observe
from crosstune.tracking.tracker import TrackingFailed, TrackingStarted
from crosstune.tracking.values import numbers

KEY = "0123456789abcdef0123456789abcdef01234567"
PROJECT = f"Tests-{secrets.token_hex(4)}"
"""Unique: trackio keeps its folder from its first import in this process, so an earlier test may have chosen the user's."""
FILES = [name for name in ("tensorboard", "trackio", "wandb") if importlib.util.find_spec(name)]
"""The installed trackers that write files."""
STEPS, BROKEN_AT = 7, 6


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed: pip install 'crosstune[track]'")


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """A busy machine may take longer to import a tracker than a user would wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "WAIT_S", 900.0)
        patch.setattr(observe, "STOPPED_WAIT_S", 900.0)
        yield


class Breaks(Seen):
    """End a run with an error at a step, after metrics.jsonl has it and before the trackers do."""

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics["step"] == BROKEN_AT:
            raise ZeroDivisionError("broken for the test")


def options(folder: Path, tiny_model: Path, **more: Any) -> dict[str, Any]:
    rows = [chat(f"say {n} ü", f"it is {n} 🙂") for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {"backend": "cpu", "precision": "fp32", "batch_size": 2, "num_epochs": 9, "lr": 1e-3}
    common |= {"num_samples": 2, "max_new_tokens": 4, "eval_samples": 4, "project_name": PROJECT}
    return common | {
        "model_name": str(tiny_model),
        "dataset": str(folder / "rows.jsonl"),
        "output_dir": str(folder / "runs"),
        "name": "läuft",
        "max_steps": STEPS,
        **more,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Path]:
    """A run with all trackers that write files: broken at step 6, and resumed from step 4."""
    if not FILES:
        pytest.skip("no tracker is installed: pip install 'crosstune[track]'")
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.delenv("WANDB_DIR", raising=False)
        wanted = options(folder, tiny_model, log_to=",".join(FILES), save_steps=4, eval_steps=3)
        with pytest.raises(ZeroDivisionError):
            train(make_config(**wanted), observers=[Breaks()])
        seen = Seen()
        result = train(make_config(**wanted, resume="auto"), observers=[seen])
        assert sorted(event.tracker for event in seen.of(TrackingStarted)) == FILES
        assert seen.of(TrackingFailed) == []
        yield result.folder


def expected(run: Path) -> dict[str, dict[int, float]]:
    """Return the values of every metric by step, as the files of the run have them."""
    rows: dict[str, dict[int, float]] = {}
    steps = [("train", row, row["step"]) for row in read_jsonl(run / "metrics.jsonl")]
    evaluations = {
        row["step"]: row for row in read_jsonl(run / "events.jsonl") if row["kind"] == "evaluation"
    }
    measured = [("eval", row["metrics"], step) for step, row in evaluations.items()]
    for kind, found, step in steps + measured:
        for name, value in numbers(kind, found).items():
            rows.setdefault(name, {})[step] = value
    assert set(rows["train/loss"]) == set(range(1, STEPS + 1)) and set(rows["eval/loss"]) == {0, 3, 6, 7}
    return rows


TIMED = ("train/step_s", "train/cpu_s", "train/tokens_per_s", "train/memory_bytes")
"""Values that differ when a step is trained again; those of the first time stay."""


def compare(found: dict[str, dict[int, float]], run: Path, *, exact: bool, replaced: bool = False) -> None:
    """Check the values by step. Steps 5 and 6 were trained twice, with the same losses."""
    wanted = expected(run)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].keys() == values.keys(), name
        for step, value in values.items():
            if name in TIMED and step == 5 and not replaced:
                continue
            assert found[name][step] == (value if exact else np.float32(value)), (name, step)


@needs("tensorboard")
def test_tensorboard_has_the_run(run: Path, tiny_model: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        rows = events.Scalars(name)
        assert len({row.step for row in rows}) == len(rows), f"{name} has a step twice"
        found[name] = {row.step: row.value for row in rows}
    compare(found, run, exact=False, replaced=True)
    samples = make_ndarray(events.Tensors("eval/samples")[-1].tensor_proto)[0].decode()
    assert "| prompt | answer | reference |" in samples and "🙂" in samples
    config = make_ndarray(events.Tensors("config")[0].tensor_proto)[0].decode()
    assert '"method": "lora"' in config and '"torch": "' in config and str(tiny_model) in config
    assert len(list((run / "tensorboard").iterdir())) == 2


@needs("trackio")
def test_trackio_has_the_run(run: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    [named] = SQLiteStorage.get_run_records(PROJECT)
    assert named["name"] == "läuft"
    rows = SQLiteStorage.get_logs(PROJECT, "läuft")
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name in (name for name in row if name.startswith(("train/", "eval/"))):
            if name != "eval/samples":
                assert row["step"] not in found.setdefault(name, {}), f"{name} has a step twice"
                found[name][row["step"]] = row[name]
    compare(found, run, exact=True)
    tables = [row["eval/samples"] for row in rows if "eval/samples" in row]
    assert len(tables) == 4 and "🙂" in json.dumps(tables, ensure_ascii=False)
    assert (SQLiteStorage.get_run_config(PROJECT, "läuft") or {})["method"] == "lora"


def read_log(raw: bytes) -> Iterator[bytes]:
    """Yield the records of an offline file, a log in the format of LevelDB. wandb has no reader in Python any more."""
    assert raw[:4] == b":W&B"
    block, place, parts = 1 << 15, 7, bytearray()
    while place + 7 <= len(raw):
        if block - place % block < 7:  # the padding at the end of a block
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", raw, place + 4)
        parts += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield bytes(parts)
            parts.clear()


def read_wandb(run: Path) -> tuple[list[Any], str]:
    """Return the records of all offline files of a run, and the text of the files beside them."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in read_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
    beside = [path for path in (run / "wandb").rglob("*") if path.is_file() and path.suffix != ".wandb"]
    return records, "".join(path.read_text(encoding="utf-8") for path in beside)


@needs("wandb")
def test_wandb_has_the_run(run: Path) -> None:
    records, beside = read_wandb(run)
    found: dict[str, dict[int, float]] = {}
    num_tables = 0
    for record in records:
        if not record.HasField("history"):
            continue
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        step = record.history.step.num
        num_tables += any(name.startswith("eval/samples/") for name in items)
        for name in (name for name in items if name.startswith(("train/", "eval/"))):
            if not name.startswith("eval/samples/"):
                assert step not in found.setdefault(name, {}), f"{name} has a step twice"
                found[name][step] = json.loads(items[name])
    compare(found, run, exact=True)
    assert num_tables == 4 and "🙂" in beside
    starts = [record.run for record in records if record.HasField("run")]
    assert {start.run_id for start in starts} == {json.loads((run / "tracking/wandb.json").read_text())["id"]}
    assert {start.project for start in starts} == {PROJECT} and starts[0].display_name == "läuft"
    assert not any(record.HasField("output") or record.HasField("output_raw") for record in records)
    ends = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert ends == [1, 0], "the broken part, and the finished one"


@needs("wandb")
def test_wandb_collects_nothing_about_the_user(run: Path) -> None:
    names = {path.name for path in (run / "wandb").rglob("*") if path.is_file()}
    assert not names & {"wandb-metadata.json", "requirements.txt", "diff.patch", "output.log"}
    records, _ = read_wandb(run)
    starts = [record.run for record in records if record.HasField("run")]
    assert starts and not any(start.host or start.HasField("git") for start in starts)
    assert not any(record.HasField("environment") for record in records)


def test_the_key_is_in_no_file(run: Path) -> None:
    folders = [run, run.parent.parent / "trackio"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


class Stub(ThreadingHTTPServer):
    """What the client of weave needs of its servers: it answers, and keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        if path.startswith("/graphql"):
            viewer = {"username": "me", "defaultEntity": {"name": "team"}}
            return {"data": {"viewer": viewer, "project": {"name": PROJECT}}}
        if path.endswith("server_info"):
            return {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"}
        if path.endswith("table/create"):
            return {"digest": "t" * 43, "row_digests": ["r" * 43] * len(body["table"]["rows"])}
        return {"digest": "d" * 43}

    def calls(self) -> list[dict[str, Any]]:
        return [
            call for path, body in self.requests if path.endswith("/calls/complete") for call in body["batch"]
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        is_json = "json" in (self.headers.get("content-type") or "")
        body = json.loads(raw) if raw and is_json else raw.decode(errors="replace")
        self.server.requests.append((self.path, body))
        answer = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@needs("weave")
def test_weave_is_sent_the_run(
    stub: Stub, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "mlx" if importlib.util.find_spec("mlx") else "cpu"  # the other engine than above
    address = f"http://127.0.0.1:{stub.server_address[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WF_TRACE_SERVER_URL", f"{address}/traces")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    seen = Seen()
    wanted = options(tmp_path, tiny_model, log_to="weave", backend=backend, max_steps=3)
    folder = train(make_config(**wanted), observers=[seen]).folder
    assert seen.of(TrackingFailed) == [], seen.of(TrackingFailed)
    assert seen.of(TrackingStarted)[0].where.startswith(f"{address}/team/{PROJECT}/")
    [rows] = [body["table"]["rows"] for path, body in stub.requests if path.endswith("table/create")]
    assert rows == read_jsonl(folder / "metrics.jsonl")
    calls = stub.calls()
    measured = [call for call in calls if "/op/crosstune.eval:" in call["op_name"]]
    measured.sort(key=lambda call: call["inputs"]["step"])
    evaluations = [row for row in read_jsonl(folder / "events.jsonl") if row["kind"] == "evaluation"]
    assert [(call["inputs"]["step"], call["output"]) for call in measured] == [
        (row["step"], {f"eval/{name}": value for name, value in row["metrics"].items()})
        for row in evaluations
    ]
    samples = [call for call in calls if "/op/crosstune.eval.samples:" in call["op_name"]]
    told = [(call["inputs"]["prompt"], call["output"]["answer"]) for call in samples]
    made = [(one["prompt"], one["answer"]) for row in evaluations for one in row["samples"]]
    assert sorted(told) == sorted(made)
    text = json.dumps(stub.requests)
    assert KEY not in text and '"final_loss"' in text


NO_KEY = """
import sys
from pathlib import Path
from crosstune.config.load import make_config
from crosstune.tracking.tracker import TrackingFailed
from crosstune.tracking import observe
from tracked import Seen

observe.STOPPED_WAIT_S = 900.0
seen = Seen()
with observe.Tracking() as tracking:
    tracking.start(make_config(log_to="wandb"), {}, folder=Path(sys.argv[1]), report=seen)
print([failed.error for failed in seen.of(TrackingFailed)])
"""


@needs("wandb")
def test_wandb_without_a_key_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose login counts otherwise
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    # wandb reads its variables once in a process.
    done = subprocess.run(
        [sys.executable, "-c", NO_KEY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "it has no valid key" in done.stdout and "WANDB_MODE=offline" in done.stdout
