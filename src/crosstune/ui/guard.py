"""Protect the page: accept only small requests with the token, from this machine and this page."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import urllib.parse
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import write_text
from crosstune.files.plain_files import read_plain_text
from crosstune.ui.jobs import FOLDER

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY_BYTES = 1 << 20
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CLOSED = "This page needs the address that `crosstune ui` printed, with its token: open that address once.\n"


class Guard:
    """Refuse requests without the token, from other hosts or pages, or with large bodies; add the security headers."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self.app, self.token = app, token
        self.cookie = f"crosstune_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        request = Request(scope)
        if (refused := self._refuse(request)) is not None:
            await refused(scope, receive, send_guarded)
            return
        taken = 0

        async def receive_limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MOST_BODY_BYTES:
                raise _TooLargeError
            return message

        try:
            await self.app(scope, receive_limited, send_guarded)
        except ClientDisconnect:
            pass  # it left before it had sent all
        except _TooLargeError:
            await plain(413, "The request is too large.")(scope, receive, send_guarded)

    def _refuse(self, request: Request) -> Response | None:
        headers, is_start = request.headers, request.url.path == "/"
        host = headers.get("host", "")
        try:
            origin = urllib.parse.urlsplit(headers.get("origin", ""))
            name = urllib.parse.urlsplit(f"//{host}").hostname
        except ValueError:
            return plain(400, "The request has malformed headers.")
        if name not in LOOPBACK:
            return plain(403, "This page is available on this machine's loopback address only.")
        is_other = "origin" in headers and (origin.scheme != "http" or origin.netloc != host)
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_other or (is_foreign and not is_start):
            return plain(403, "Requests from other pages are refused.")
        if request.method not in ("GET", "HEAD", "POST"):
            return plain(405, "This method is not allowed.")
        if is_start and self._is_token(request.query_params.get("token", "")):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", max_age=400 * 86400)
            return answer
        if not self._is_token(request.cookies.get(self.cookie, "")):
            return plain(401, _CLOSED)
        if request.method == "POST" and not self._is_token(headers.get("x-crosstune-token", "")):
            return plain(403, "Changes require the token of the page.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY_BYTES:
            return plain(413, "The request is too large.")
        return None

    def _is_token(self, sent: str) -> bool:
        return hmac.compare_digest(sent.encode(), self.token.encode())


class _TooLargeError(Exception):
    """A body without a length went on beyond the limit."""


def plain(status: int, text: str) -> Response:
    return PlainTextResponse(text, status_code=status)


def read_token(parent: Path) -> str:
    """Return the token of a runs folder, made once: an open page finds its server again after a restart."""
    path = parent / FOLDER / "token"
    try:
        found, mode = read_plain_text(path, limit=1 << 10).strip(), path.stat().st_mode
    except UserError:
        found, mode = "", 0
    if not re.fullmatch(r"[\w-]{32,}", found, re.ASCII) or mode & 0o077:
        found = secrets.token_urlsafe(32)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        write_text(path, found + "\n")
        path.chmod(0o600)
    return found
