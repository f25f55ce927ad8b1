"""`crosstune ui`: a page on this machine to see, start, stop and compare runs."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from crosstune.cli.arguments import Parser, at_least, read_path
from crosstune.cli.terminal.output import print_line
from crosstune.core.errors import EXIT_DONE, UserError

EXAMPLES = """examples:
  crosstune ui
  crosstune ui --output_dir experiments --port 9000 --no_browser
  ssh -L 8642:127.0.0.1:8642 SERVER crosstune ui --no_browser      (the page of another machine)

The page listens on this machine's loopback address only, and requires the token in the printed address. Runs started from
it are ordinary commands: they continue when the page is closed or this command ends."""
DEFAULT_PORT = 8642


def make_parser() -> Parser:
    about = "Open a page to see runs live, start and stop them, compare them and chat with them."
    parser = Parser("ui", description=about, epilog=EXAMPLES, has_json=False)
    add = parser.add_argument
    add("--output_dir", type=read_path, default=Path("runs"), help="runs folder (default runs)")
    port = f"port (default {DEFAULT_PORT}; 0: a free one)"
    add("--port", type=at_least(0, high=65535), default=DEFAULT_PORT, help=port)
    add("--no_browser", action="store_true", help="print the address, without opening it")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn")):
        raise UserError("The page needs starlette and uvicorn.", do="pip install 'crosstune[ui]'")
    from crosstune.ui.guard import read_token
    from crosstune.ui.server import make_server

    if own.output_dir.exists() and not own.output_dir.is_dir():
        raise UserError(f"{own.output_dir} is not a folder.", do="choose a different --output_dir")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", own.port))
            listener.listen(128)  # a browser that opens the address early waits for an answer
        except OSError as error:
            raise UserError(
                f"Cannot listen on port {own.port}.",
                why=f"{error.strerror}.",
                do="choose a different --port (0: any free port), or open the page that is running there",
            ) from error
        token = read_token(own.output_dir)
        server = make_server(own.output_dir, token=token)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
        print_line(f"ready    {url}   (Ctrl-C stops the page; runs continue)")
        if not own.no_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    return EXIT_DONE
