"""The page's server: what it refuses, what it says about runs of any kind, and nothing lost across its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from report_runs import HOSTILE, PLAN, STEP, Page, make_run, write_lines
from ui_server import WAIT_S, Served, serving, until

from crosstune.core.errors import UserError
from crosstune.files.run_lock import hold
from crosstune.ui import runs as pages
from crosstune.ui.guard import Guard, read_token
from crosstune.ui.runs import MOST_BYTES, NUM_BUCKETS, Runs
from crosstune.ui.server import make_server

NAME = "<img src=x onerror=alert(1)> 'quoted' \"run\""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "demo")
    make_run(folder / "other", num_steps=20)
    make_run(folder / NAME)
    (folder / "secret.txt").write_text("a secret")
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as found:
        yield found


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/events?run=demo", "/nowhere"])
def test_nothing_is_shown_without_the_token(served: Served, path: str) -> None:
    answer = served.send("GET", path, without=("Cookie",))
    assert answer.status == 401
    assert b"crosstune ui" in answer.body
    assert served.send("GET", path, Cookie=served.cookie[:-1] + "x").status == 401
    assert served.send("GET", f"{path.split('?')[0]}?token=wrong", without=("Cookie",)).status == 401


def test_the_printed_address_opens_the_page(served: Served) -> None:
    answer = served.send("GET", f"/?token={served.token}", without=("Cookie",))
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert served.cookie in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = served.send("GET", "/")
    assert page.status == 200
    assert served.token.encode() in page.body


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": "[::"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
    {"Origin": "https://127.0.0.1"}, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
])  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("GET", "/api/runs"), ("POST", "/api/check")])
def test_other_hosts_and_pages_are_refused(
    served: Served, headers: dict[str, str], method: str, path: str
) -> None:
    assert served.send(method, path, b"{}", **headers).status in (400, 403)


def test_changes_need_the_token_of_the_page_and_a_post(served: Served) -> None:
    body = {"options": {}}
    assert served.send("POST", "/api/check", body, without=("X-Crosstune-Token",)).status == 403
    assert served.send("POST", "/api/check", body, X_Crosstune_Token="x").status == 403
    for path in ("train", "stop", "resume", "merge", "export", "serve", "chat", "plan"):
        assert served.send("GET", f"/api/{path}?run=demo").status == 405
    assert served.send("PUT", "/api/check", body).status == 405
    origin = f"http://127.0.0.1:{served.port}"
    assert served.send("POST", "/api/check", body, Origin=origin, Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("name", [
    "..", "../demo", "demo/../../secret.txt", "/etc", "%2e%2e/demo", ".ui", ".", "", "demo/.", "demo\0", "secret.txt", "x" * 5000,
    "demo\\..\\..", "no such run", "\ud800",
])  # fmt: skip
def test_only_runs_of_the_folder_are_read(served: Served, name: str) -> None:
    text = quote(name, errors="surrogatepass")
    for path in ("run", "page", "charts", "events", "poll", "compare"):
        answer = served.send(
            "GET", f"/api/{path}?run={text}&run=demo" if path == "compare" else f"/api/{path}?run={text}"
        )
        assert answer.status == 400, (path, answer.body)
        assert b"secret" not in answer.body.replace(b"secret.txt", b"")
    assert served.post("resume", {"run": name}).status == 400
    assert served.post("export", {"run": name, "to": "hf"}).status == 400


@pytest.mark.parametrize(
    "path", ["../server.py", "..%2fserver.py", "%2e%2e/server.py", "/etc/passwd", "uplot/LICENSE"]
)
def test_static_files_are_those_of_the_page(served: Served, path: str) -> None:
    assert served.send("GET", f"/static/{path}").status == 404


def test_large_bodies_are_refused_before_they_are_read(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as connection:
        head = f"POST /api/check HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {served.cookie}\r\nX-Crosstune-Token: {served.token}\r\n"
        connection.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")

    def endless() -> Iterator[bytes]:
        for _ in range(1 << 14):
            yield b"x" * (1 << 16)

    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT_S)
    headers = {"Cookie": served.cookie, "X-Crosstune-Token": served.token}
    try:
        connection.request("POST", "/api/check", endless(), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server closed the connection before all was sent
    finally:
        connection.close()
    assert served.post("check", {"options": {}}).status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"options": []}', b'{"options": {"lr": ' + b"[" * 3000]
)
def test_a_damaged_request_is_one_clear_error(served: Served, body: bytes) -> None:
    answer = served.post("check", body)
    assert answer.status == 400
    assert answer.data["error"]


def test_every_answer_has_the_policy(served: Served) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/api/run?run=none", "/nowhere"):
        policy = served.send("GET", path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_texts_of_a_strangers_run_stay_texts(served: Served) -> None:
    listed = served.get("/api/runs")["runs"]
    assert NAME in [run["name"] for run in listed]
    for path in (f"page?run={quote(NAME)}", f"compare?run={quote(NAME)}&run=demo"):
        page = Page(served.get(f"/api/{path}"))
        assert page.count("script") == 1  # the report's own
        assert page.count("img") == 0
        assert HOSTILE.split("</script>")[0] in page.text or "compare" in path
    charts = served.send("GET", f"/api/charts?run={quote(NAME)}")
    assert charts.headers["content-type"] == "application/json"
    assert "Evaluation: <b>odd</b>" in [chart["title"] for chart in charts.data["charts"]]


def test_the_list_has_what_a_line_shows(served: Served) -> None:
    found = served.get("/api/runs")
    [demo] = [run for run in found["runs"] if run["name"] == "demo"]
    assert (demo["status"], demo["steps"], demo["num_steps"], demo["eta_s"]) == ("finished", 40, 40, None)
    assert demo["spark"][0] == 3.0
    assert len(demo["spark"]) <= 64
    again = served.send("GET", "/api/runs", If_None_Match=served.send("GET", "/api/runs").headers["etag"])
    assert again.status in (200, 304)


def test_the_charts_are_those_of_the_report(served: Served, runs: Path) -> None:
    from crosstune.report import load_run, render

    charts = served.get("/api/charts?run=demo")["charts"]
    page = render(load_run(runs / "demo"))
    for chart in charts:
        assert chart["title"].replace("<", "&lt;").replace(">", "&gt;") in page
    loss = charts[0]
    assert loss["series"][0]["y"] == [float(f"{3 / step:.7g}") for step in range(1, 41)]
    assert [each["x_label"] for each in loss["others"]] == ["tokens", "seconds"]
    assert loss["others"][0]["series"][0]["x"][-1] == 4000
    plain = served.get("/api/charts?run=demo&smoothing=0")["charts"][0]["series"]
    assert [each["label"] for each in plain] == ["each step", "evaluation"]
    both = served.get("/api/charts?run=demo&run=other")["charts"][0]
    assert [each["label"] for each in both["series"]] == ["demo", "other"]
    assert [each["x_label"] for each in both["others"]] == ["tokens", "seconds"]


def test_a_long_run_is_sampled_and_shown_closer(tmp_path: Path) -> None:
    num_steps = 60_000
    folder = make_run(tmp_path / "long", without=("summary.json",))
    rows = [{"step": step, "loss": 5 - step / num_steps} | STEP for step in range(1, num_steps + 1)]
    write_lines(folder / "metrics.jsonl", rows)
    assert (folder / "metrics.jsonl").stat().st_size > MOST_BYTES
    with serving(tmp_path) as served:
        found = served.get("/api/charts?run=long")
        assert found["sampled"]
        first = found["charts"][0]["series"][0]
        assert NUM_BUCKETS < len(first["x"]) <= 3 * NUM_BUCKETS + 2
        assert (first["x"][0], first["x"][-1]) == (1, num_steps)
        tokens = found["charts"][0]["others"][0]["span"][1]
        assert tokens == 100 * num_steps
        near = served.get("/api/charts?run=long&from=30000&to=30100")["charts"][0]["series"][0]
        assert near["x"] == list(range(30_000, 30_101))
        assert served.get("/api/runs")["runs"][0]["steps"] == num_steps


@pytest.mark.parametrize(
    "name", ["plan.json", "metrics.jsonl", "events.jsonl", "summary.json", "config.yaml"]
)
@pytest.mark.parametrize(
    "content", [b"", b'{"step": 1, "lo', b"\xff\xfe\x00", b"[1]", b'{"name": [[]], "step": "x", "data": 3}']
)
def test_damaged_files_of_a_run_are_said_and_harm_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    found = Runs(tmp_path)
    assert [row["name"] for row in found.listing()["runs"]] == ["run"]
    assert "<!doctype html>" in found.page("run")
    assert json.loads(found.charts(["run"], smoothing=1.0))["charts"] is not None
    assert found.changes("run", "").status


def test_a_moved_folder_is_said_on_the_stream_and_in_the_list(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    with serving(tmp_path) as served, served.events("demo") as events:
        assert next(events)[2]["status"] == "finished"
        (tmp_path / "demo").rename(tmp_path / "moved")
        assert next(event for event in events if event[1] == "gone")
        assert [run["name"] for run in served.get("/api/runs")["runs"]] == ["moved"]
        assert "does not exist" in served.send("GET", "/api/run?run=demo").data["why"]


def test_an_empty_and_a_missing_folder_have_an_empty_list(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    with serving(folder) as served:
        found = served.get("/api/runs")
        assert found["runs"] == []
        assert shlex.split(found["start"])[-2:] == ["--output_dir", str(folder)]
        assert served.get("/api/form")["name"] == "run-1"


def test_events_continue_after_a_restart_of_the_server(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", num_steps=3)

    def append(text: str) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(text)

    with serving(tmp_path) as served:
        position = served.get("/api/charts?run=demo")["position"]
        with served.events("demo", after=position) as events:
            append('{"step": 4, "loss": 2.0}\n{"step": 5, "lo')
            place, _, data = next(event for event in events if event[2]["rows"])
            assert [row["step"] for row in data["rows"]] == [4]  # half a line is not a row yet
    append('ss": 1.5}\n')
    with serving(tmp_path) as again:
        assert again.token == served.token  # an open page is still welcome
        with again.events("demo", last=place, after=position) as events:
            after, _, data = next(events)
            assert [row["step"] for row in data["rows"]] == [5]
        assert again.get(f"/api/poll?run=demo&after={place}")["rows"] == data["rows"]
        assert again.get(f"/api/poll?run=demo&after={after}")["rows"] == []
        write_lines(tmp_path / "new", [{"step": 1, "loss": 9.0}])
        (tmp_path / "new").replace(folder / "metrics.jsonl")  # as a resume does
        until(lambda: again.get(f"/api/poll?run=demo&after={after}").get("reset"))
        for odd in ("", "1-2", "x-y-z", f"{after.split('-')[0]}-{10**18}-0", "9" * 400):
            assert again.get(f"/api/poll?run=demo&after={odd}")["reset"]


def test_folders_with_runs_of_their_own_are_groups(tmp_path: Path) -> None:
    sweep = tmp_path / "search"
    (sweep / "trials").mkdir(parents=True)
    trial = {"name": "trial-000", "status": "finished", "value": 0.5, "params": {"lr": 0.1}, "step": 40}
    found = {
        "metric": "eval_loss",
        "over": {"lr": {"low": 0.1, "high": 0.2}},
        "trials": [trial],
        "best": "trial-000",
    }
    (sweep / "sweep.json").write_text(json.dumps(found))
    make_run(sweep / "trials" / "trial-000")
    (tmp_path / "empty").mkdir()
    with serving(tmp_path) as served:
        assert served.get("/api/runs")["groups"] == [{"name": "search", "kind": "sweep", "runs": 1}]
        name = "search/trials/trial-000"
        assert [run["name"] for run in served.get("/api/runs?in=search")["runs"]] == [name]
        assert served.get(f"/api/run?run={name}")["status"] == "finished"
        assert "trial-000 has the lowest eval_loss" in (page := served.get("/api/page?run=search"))
        assert "best.yaml" not in page, "it is written at the end"
        (sweep / "best.yaml").write_text("lr: 0.1\n")
        (sweep / "sweep.json").write_text(json.dumps(found | {"goal": "max"}))
        assert "best.yaml" in served.get("/api/page?run=search")


def test_a_ladder_is_shown_as_its_page(tmp_path: Path) -> None:
    folder = tmp_path / "climb"
    folder.mkdir()
    (folder / "trials").mkdir()
    make_run(folder / "trials" / "original")
    rung = {
        "title": "Packing <b>",
        "outcome": "kept",
        "why": "faster",
        "promise": "same",
        "measured": {"speed": 1.5, "memory": 1.0},
    }
    with serving(tmp_path) as served:
        [group] = served.get("/api/runs")["groups"]
        assert group == {"name": "climb", "kind": "ladder", "runs": 1}, "before it has a result"
        assert "ladder has no result: it was stopped" in served.get("/api/page?run=climb")
        with hold(folder):
            until(lambda: "ladder is running" in served.get("/api/page?run=climb"))
        (folder / "ladder.json").write_text(json.dumps({"rungs": [rung], "criteria": [], "ends": {}}))
        assert served.get("/api/runs")["groups"] == [group]
        assert [run["name"] for run in served.get("/api/runs?in=climb")["runs"]] == ["climb/trials/original"]
        assert "Packing &lt;b&gt;" in served.get("/api/page?run=climb")


def test_the_page_offers_what_can_be_done_with_a_result(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my run")
    summary = json.loads((folder / "summary.json").read_text())
    with serving(tmp_path) as served:

        def uses(**more: Any) -> Any:
            (folder / "summary.json").write_text(json.dumps(summary | more))
            return served.get("/api/run?run=my%20run")["uses"]

        adapter = {"generates": True, "result": "runs/x/adapter", "status": "finished"}
        assert uses(**adapter) == ["chat", "merge", "export"]
        assert uses(**adapter | {"result": "runs/x/model"}) == ["chat", "export"], "nothing to merge"
        assert uses(**adapter | {"generates": False}) == [], "a scalar judge, latent diffusion"
        assert uses(**adapter | {"status": "stopped"}) == uses(**adapter | {"result": None}) == []
        assert served.get("/api/run?run=my%20run")["list_command"] == f"crosstune checkpoint list '{folder}'"


def test_plan_of_an_unfinished_run(tmp_path: Path) -> None:
    """A run of an older version, without newer fields."""
    folder = make_run(tmp_path / "old", without=("summary.json", "config.yaml", "events.jsonl"))
    (folder / "plan.json").write_text(json.dumps({"options": PLAN["options"]}))
    with serving(tmp_path) as served:
        about = served.get("/api/run?run=old")
        assert (about["status"], about["checkpoints"]) == ("unknown", [])
        assert "old" in served.get("/api/page?run=old")


def test_a_resumed_run_that_was_killed_is_not_shown_as_stopped(tmp_path: Path) -> None:
    """Its summary and its `stopped` event are of the part before the resume."""
    folder = make_run(tmp_path / "demo")
    (folder / "summary.json").write_text(json.dumps({"status": "stopped", "steps": 20}))
    kinds = ("start", "stopped", "start", "checkpoint")
    write_lines(
        folder / "events.jsonl", [{"time": 1000.0 + at, "kind": kind} for at, kind in enumerate(kinds)]
    )
    os.utime(folder / "summary.json", (1001.5, 1001.5))
    os.utime(folder / "plan.json", (1001.8, 1001.8))
    (tmp_path / ".locks").mkdir()
    (tmp_path / ".locks" / "demo.lock").touch()
    with serving(tmp_path) as served:
        about = served.get("/api/run?run=demo")
        assert (about["status"], about["steps"]) == ("killed", 40)
        os.utime(folder / "summary.json", (5000.0, 5000.0))  # as in a copied folder
        os.utime(folder / "plan.json", (5001.0, 5001.0))
        assert until(lambda: served.get("/api/run?run=demo")["status"] == "stopped")


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", "\x1b[1m", os.fsdecode(b"\xff"), "loop", "not-a-folder", "long"])  # fmt: skip
def test_an_odd_entry_leaves_the_others_in_the_list(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "good")
    (tmp_path / "file").touch()
    targets = {"loop": "loop", "not-a-folder": "file/below", "long": "x" * 300}
    if name in targets:
        (tmp_path / name).symlink_to(targets[name])
    else:
        make_run(tmp_path / name)
    assert [row["name"] for row in Runs(tmp_path).listing()["runs"]] == ["good"]


def test_a_run_removed_while_it_is_listed_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "good"):
        make_run(tmp_path / name)
    runs = Runs(tmp_path)
    read = runs.row

    def remove_first(name: str) -> dict[str, Any]:
        if name == "gone":
            shutil.rmtree(tmp_path / name)
        return read(name)

    monkeypatch.setattr(runs, "row", remove_first)
    assert [row["name"] for row in runs.listing()["runs"]] == ["good"]


def test_streams_end_with_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "demo")
    with serving(tmp_path) as served, contextlib.ExitStack() as streams:
        for _ in range(3):
            next(streams.enter_context(served.events("demo")))
        streams.pop_all()  # they stay open
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", [b"", b"[]", b"5", b'{"rungs": NaN}', b"\xff\x00", b'{"rungs":' + b"[" * 5000])  # fmt: skip
def test_a_damaged_ladder_is_one_clear_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "climb").mkdir()
    (tmp_path / "climb" / "ladder.json").write_bytes(text)
    with pytest.raises(UserError, match=r"ladder\.json"):
        Runs(tmp_path).page("climb")


def test_a_client_that_leaves_while_it_sends_is_no_error(tmp_path: Path) -> None:
    token = read_token(tmp_path)
    app: Any = make_server(tmp_path, token=token).config.app
    cookie = f"{Guard(app, token=token).cookie}={token}"
    headers = {"host": "127.0.0.1", "cookie": cookie, "x-crosstune-token": token}
    scope = {"type": "http", "method": "POST", "path": "/api/check", "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent == []


def test_pages_that_ask_together_read_a_growing_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_reads, load = make_run(tmp_path / "demo", num_steps=400), itertools.count(), pages.load_run

    def load_slowly(*words: Any, **more: Any) -> Any:
        next(num_reads)
        time.sleep(0.3)
        return load(*words, **more)

    monkeypatch.setattr(pages, "load_run", load_slowly)
    runs = Runs(tmp_path)
    with hold(folder), ThreadPoolExecutor(12) as pool:
        asked = []
        for step in range(12):
            asked.append(pool.submit(runs.load, "demo"))
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**STEP, "step": 100 + step, "loss": 1.0}) + "\n")
            time.sleep(0.02)
        assert len({id(each.result()[1]) for each in asked}) == 1
    assert next(num_reads) == 1
