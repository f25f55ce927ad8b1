"""The main program of an engine server: run it until the parent process exits.

The parent holds the other end of standard input. Its first line is the request; the end of file means that the parent is
gone, even if it was killed, so nothing is left behind.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_watch_parent, daemon=True).start()
    os.environ.update(asked["environment"])
    if asked["module"] is None:
        _serve_llamacpp(asked["settings"])
    else:
        sys.argv = [asked["module"], *asked["words"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def _watch_parent() -> None:
    # os.read, because a second reader of sys.stdin would hold its lock while Python shuts down.
    while os.read(0, 4096):
        pass
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with the processes that the engine started
    os._exit(0)


def _serve_llamacpp(settings: Mapping[str, Any]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.hostnames, params.port = ["127.0.0.1"], settings["port"]
    params.api_keys = [settings["api_key"]]
    params.n_parallel = settings["num_slots"]
    params.n_ctx = settings["num_slots"] * settings["context_length"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["num_threads"]
    params.model_alias = {settings["name"]}
    params.verbosity = 1  # errors
    params.offline, params.ui, params.endpoint_slots = True, False, False
    server = xllamacpp.Server(params)
    threading.Event().wait()
    del server
