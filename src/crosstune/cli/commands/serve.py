"""`crosstune serve`: serve runs and models over the OpenAI protocol."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence

from crosstune.cli.arguments import Parser, announce_command, at_least, read_key, read_run
from crosstune.cli.terminal.output import QUIET, WARNING, Output, print_line
from crosstune.core.errors import EXIT_DONE
from crosstune.serve.router import Router

EXAMPLES = """examples:
  crosstune serve runs/demo
  crosstune serve runs/demo --also smollm2-135m              (tuned and base model side by side)
  crosstune serve demo-q8_0.gguf --port 8080
  crosstune serve runs/demo --host 0.0.0.0 --api_key KEY     (reachable from other machines)

Clients use http://127.0.0.1:8000/v1 with a model name from /v1/models. The engine is vLLM on an NVIDIA GPU if it is
installed, mlx-lm on a Mac, and llama.cpp elsewhere. A run is exported for its engine once, and kept in the cache
(`crosstune models` lists it) until the run changes."""


def make_parser() -> Parser:
    about = "Serve a run or a model over the OpenAI protocol, on this machine only."
    parser = Parser("serve", description=about, epilog=EXAMPLES, has_json=False)
    add = parser.add_argument
    add(
        "target",
        type=read_run,
        metavar="RUN|MODEL|FILE.gguf",
        help="a run, an adapter, a model or a GGUF file",
    )
    also = "serve another run or model at the same address; may be repeated"
    add("--also", type=read_run, action="append", default=[], metavar="RUN|MODEL", help=also)
    add("--port", type=at_least(0, high=65535), default=8000, help="port (default 8000; 0: a free one)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--api_key", type=read_key, metavar="KEY", help="require this key from clients")
    engines = ("auto", "llamacpp", "mlx", "vllm", "transformers")
    add("--engine", choices=engines, default="auto", help="the server that computes (default auto)")
    slots = "requests answered at the same time, others wait (default 4; llamacpp and mlx)"
    add("--parallel", type=at_least(1, high=256), default=4, help=slots)
    context = (
        "tokens of prompt and answer per request (default: the model's, at most 4096; llamacpp and vllm)"
    )
    add("--context_length", type=at_least(16), help=context)
    threads = "threads on a CPU (default: all cores; llamacpp)"
    add("--threads", type=at_least(1, high=1024), help=threads)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    with Router(
        own.host, own.port, api_key=own.api_key or ""
    ) as router:  # before the slow work, since the port may be in use
        router.start()
        announce_command(
            "serve", f"{', '.join([own.target, *own.also])} on {router.url}/v1", "importing the engine"
        )
        if not router.only_loopback and not own.api_key:
            text = f"warning  anyone who reaches {own.host} can use the model; add --api_key KEY"
            Output().line(text, style=WARNING)
        try:
            return _serve(own, router)
        finally:
            router.shutdown()


def _serve(own: argparse.Namespace, router: Router) -> int:
    from crosstune.cli.terminal.screen import Screen
    from crosstune.process.this_process import handling
    from crosstune.serve.server import ServeRequest, serving

    request = ServeRequest(
        targets=[own.target, *own.also],
        engine=own.engine,
        num_slots=own.parallel,
        context_length=own.context_length,
        num_threads=own.threads,
    )
    say, start = Output().line, time.monotonic()
    with handling(_stop), Screen(live=True) as screen:
        with serving(request, router, observer=screen, say=lambda line: say(line, style=QUIET)) as children:
            for line in _ready_lines(router, own, seconds=time.monotonic() - start):
                print_line(line)
            try:
                while True:
                    time.sleep(0.5)
                    for child in children:
                        child.check_alive()
            except KeyboardInterrupt:
                say("stopping ...", style=QUIET)
        return EXIT_DONE


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _ready_lines(router: Router, own: argparse.Namespace, *, seconds: float) -> list[str]:
    names = list(router.models)
    body = {"model": names[0], "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $KEY"' if own.api_key else ""
    return [
        f"ready    {router.url}/v1   {', '.join(names)}   (in {seconds:.0f} s; Ctrl-C stops)",
        f'try it   curl {router.url}/v1/chat/completions -H "Content-Type: application/json"{key} '
        f"-d {shlex.quote(json.dumps(body))}",
        f"chat     crosstune chat --server {router.url}{' --api_key $KEY' if own.api_key else ''}",
    ]
