"""The page's forms, and the jobs that they start: names, tokens, commands and their ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from report_runs import make_run
from ui_server import WAIT_S, Served, serving, until

from crosstune.cli.main import main
from crosstune.config.schema import option_list
from crosstune.ui.form import reserve_name
from crosstune.ui.guard import read_token
from crosstune.ui.jobs import Jobs, is_alive


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "demo")
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as found:
        yield found


def test_the_form_has_every_option_and_explains_wrong_values(served: Served, runs: Path) -> None:
    form = served.get("/api/form")
    names = {option["name"] for option in form["options"]}
    assert names == {option.name for option in option_list()} - {"output_dir", "resume"}
    assert all(option["text"] and option["takes"] for option in form["options"])
    asked = {
        "name": "new",
        "lr": "1e-3",
        "packing": "true",
        "dataset": "--odd",
        "max_steps": "-1",
        "eval_dataset": " ",
    }
    found = served.post("check", {"options": asked}).data
    assert found["command"] == (
        f"crosstune train --name new --lr 1e-3 --packing true --dataset=--odd --max_steps -1 --output_dir {runs}"
    )
    assert found["problems"] == []
    wrong = served.post("check", {"options": {"lr": "fast", "batch_size": "-3"}}).data["problems"]
    assert {problem["option"] for problem in wrong} == {"lr", "batch_size"}
    assert served.post("train", {"options": {"lr": "fast"}}).status == 400
    assert served.post("check", {"options": {"no_such": "1"}}).status == 400
    assert served.post("check", {"options": {"name": "a\0b"}}).status == 400
    assert not (runs / ".ui" / "job.json").exists()


def test_a_job_is_an_own_process_whose_end_another_server_sees(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    started = jobs.start("options", ["options", "lr", "--json"], target=str(tmp_path / "run"))
    assert (started["run"], started["command"]) == ("run", "crosstune options lr --json")
    record = json.loads((tmp_path / ".ui" / started["id"] / "job.json").read_text())
    if is_alive(record):
        assert os.getsid(record["pid"]) == record["pid"] != os.getsid(0)
    done = until(lambda: (job := jobs.read(started["id"]))["state"] != "running" and job)
    assert (done["state"], done["result"]["name"]) == ("done", "lr")
    assert Jobs(tmp_path).listing()[0]["state"] == "done"
    failed = jobs.start("train", ["train", "--lr", "fast", "--json"], target="run")
    ended = until(lambda: (job := jobs.read(failed["id"]))["state"] != "running" and job)
    assert ended["state"] == "failed"
    assert "lr" in ended["messages"]
    for name in ("..", "none", "token", "a/b"):
        with pytest.raises(Exception, match="no such job"):
            jobs.read(name)


def test_a_job_is_known_by_its_start_too() -> None:
    own = psutil.Process()
    assert is_alive({"pid": own.pid, "created": own.create_time()})
    assert not is_alive({"pid": own.pid, "created": own.create_time() - 100})
    assert not any(
        map(is_alive, ({}, {"pid": -1, "created": 1.0}, {"pid": "1"}, {"pid": 2**40, "created": 1.0}))
    )


def test_a_port_in_use_and_a_file_as_folder_are_clear_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["ui", "--output_dir", str(tmp_path), "--no_browser", "--port", str(taken.getsockname()[1])]
        assert main(words) == 2
    assert "Cannot listen on port" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["ui", "--output_dir", str(tmp_path / "file"), "--no_browser"]) == 2


def test_the_token_is_for_its_user_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert len(served.token) >= 32
    assert (tmp_path / ".ui" / "token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("options", [{"name": ".ui"}, {"name": ".x"}, {"output_dir": "/tmp"}, {"resume": "auto"}, {"lr": "\ud800"}])  # fmt: skip
def test_the_form_starts_no_hidden_run_and_none_elsewhere(tmp_path: Path, options: dict[str, str]) -> None:
    with serving(tmp_path) as served:
        assert served.post("train", {"options": options}).status == 400
        assert [path.name for path in (tmp_path / ".ui").iterdir()] == ["token"]


@pytest.mark.parametrize("more", [{"to": "\0"}, {"to": "\ud800"}, {"to": "zip"}, {"to": ["hf"]}, {"to": "gguf", "gguf_type": "q9"}])  # fmt: skip
def test_an_export_that_cannot_be_starts_no_job(served: Served, runs: Path, more: dict[str, Any]) -> None:
    before = sorted((runs / ".ui").iterdir())
    assert served.post("export", {"run": "demo", **more}).status == 400
    assert sorted((runs / ".ui").iterdir()) == before


def test_a_number_is_a_name_and_names_are_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []
    monkeypatch.setattr(Jobs, "start", lambda self, kind, words, target: targets.append(target) or {})
    (tmp_path / "run-1").symlink_to("nowhere")
    with serving(tmp_path) as served:
        for options in ({"name": 5}, {}, {"name": " "}):
            assert served.post("train", {"options": options}).status == 200
    assert [Path(target).name for target in targets] == ["5", "run-2", "run-3"]


def test_two_starts_at_once_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["run-1", "run-1", "run-2"])
    monkeypatch.setattr("crosstune.ui.form.free_name", lambda _: next(names))
    assert [reserve_name(tmp_path), reserve_name(tmp_path)] == ["run-1", "run-2"]


def test_the_address_of_a_server_is_the_one_it_printed_first(tmp_path: Path) -> None:
    own = psutil.Process()
    folder = tmp_path / ".ui" / "job"
    folder.mkdir(parents=True)
    job = {"kind": "serve", "pid": own.pid, "created": own.create_time(), "target": "x"}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "messages").write_text("serve: http://127.0.0.1:1/v1 x\n")
    (folder / "output").write_text("engine ready http://127.0.0.1:2/v1 \n")
    assert [Jobs(tmp_path).read("job")[key] for key in ("state", "port")] == ["running", None]
    noise = "ready    http://127.0.0.1:4/v1   x\n" + "x" * (1 << 16)
    (folder / "output").write_text(f"ready    http://127.0.0.1:3/v1   x\n{noise}")
    assert [Jobs(tmp_path).read("job")[key] for key in ("state", "port")] == ["ready", 3]


def test_a_damaged_job_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        job = {"kind": "train", "pid": child.pid, "created": psutil.Process(child.pid).create_time(), "target": str(tmp_path / "run")}  # fmt: skip
        for name, text in (("a", "{"), ("b", json.dumps(job))):
            (tmp_path / ".ui" / name).mkdir(parents=True)
            (tmp_path / ".ui" / name / "job.json").write_text(text)
        try:
            Jobs(tmp_path).stop_run(tmp_path / "run")
            assert child.wait(WAIT_S) < 0
        finally:
            child.kill()


@pytest.mark.parametrize(("text", "mode", "is_kept"), [("a" * 40, 0o600, True), ("a" * 40, 0o644, False), ("a;" * 20, 0o600, False), ("é" * 40, 0o600, False), ("a", 0o600, False)])  # fmt: skip
def test_a_token_is_kept_if_it_is_a_secret(tmp_path: Path, text: str, mode: int, is_kept: bool) -> None:
    path = tmp_path / ".ui" / "token"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    found = read_token(tmp_path)
    assert (found == text) == is_kept
    assert path.stat().st_mode & 0o077 == 0
    assert read_token(tmp_path) == found
