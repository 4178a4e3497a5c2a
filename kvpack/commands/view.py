"""kvpack view: show a file in the browser, from a server that only this machine can reach."""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import re
import secrets
import sys
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvpack.errors import InvalidParameter
from kvpack.file.user_files import open_regular
from kvpack.output import add_json, print_report

ADDRESS = "127.0.0.1"
PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = {"viewer": PACKAGE / "viewer", "readers/javascript": PACKAGE / "javascript"}
"""The folders that are served, by the URL paths that the page uses."""
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
PIECE = 1 << 20
IDLE_SECONDS = 60
"""Number of seconds without a request after which a connection is closed."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; worker-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of all responses. They have no CORS header, so that pages of other origins cannot read the responses."""

_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{0,19})", re.ASCII)


def add_command(commands: Any) -> None:
    description = (
        "Show a file in the browser: header, layers, bytes by stream, verification, and images of keys and values. "
        "The page is served from this machine to this machine only, and no data leaves it. Ctrl-C ends the command."
    )
    parser = commands.add_parser("view", help="show a file in the browser", description=description)
    parser.add_argument("file", metavar="FILE", help="a kvpack file")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--open", action="store_true", help="also open the page in the default browser")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt), Viewer(arguments.file, arguments.port) as viewer:
        text = f"{arguments.file}: open {viewer.url}\nCtrl-C ends the server."
        print_report({"file": arguments.file, "url": viewer.url}, text, arguments)
        sys.stdout.flush()
        if arguments.open:
            import webbrowser

            webbrowser.open(viewer.url)
        viewer.serve_forever()
    return 0


class Viewer(ThreadingHTTPServer):
    """A server for the page and one file, under a random path that only the server's URL contains.

    ``path`` is the file, and ``port`` is the port on 127.0.0.1 (0 for a free one). Raises MissingFile if the file is not a readable regular
    file, and InvalidParameter if the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, path: str | os.PathLike[str], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self.pages = {
            f"{path}/{file.name}".removesuffix("index.html"): (TYPES[file.suffix], file.read_bytes())
            for path, folder in FOLDERS.items()
            for file in sorted(folder.iterdir())
            if file.suffix in TYPES
        }
        self.descriptor = open_regular(path)
        self.size = os.fstat(self.descriptor).st_size
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            # The base class has already closed the server.
            raise InvalidParameter(f"--port {port} cannot be used: {error}: omit --port to use a free one") from None
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        name = urllib.parse.quote(os.path.basename(os.fspath(path)), safe="", errors="replace")
        self.url = f"http://{ADDRESS}:{self.server_port}/{self.token}/viewer/#file={name}"

    def server_close(self) -> None:
        super().server_close()
        os.close(self.descriptor)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors in connections that the browser has dropped."""


class _Handler(BaseHTTPRequestHandler):
    """Responds to GET and HEAD requests for the pages and the file of a ``Viewer``."""

    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def version_string(self) -> str:
        return "kvpack"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because request URLs contain the secret token."""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            # The body would be read as the next request.
            self.close_connection = True
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
            return False
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        return True

    def do_GET(self) -> None:
        path = self._path_below_token()
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            # In a DNS rebinding attack, the request has another host name.
            self._refuse(HTTPStatus.FORBIDDEN)
        elif path == "file":
            self._send_file()
        elif path in self.server.pages:
            kind, content = self.server.pages[path]
            self._start_response(HTTPStatus.OK, {"Content-Type": kind, "Content-Length": str(len(content))})
            if self.command == "GET":
                self.wfile.write(content)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _path_below_token(self) -> str | None:
        """Return the path after the token in the URL, or None if the token is missing or wrong."""
        _, _, remainder = self.path.partition("/")
        token, _, path = remainder.partition("/")
        is_valid = hmac.compare_digest(token.encode("latin-1", "replace"), self.server.token.encode())
        return path if is_valid and self.path.startswith("/") else None

    def _start_response(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        content = f"{status.value} {status.phrase}\n".encode()
        self._start_response(status, {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(content))} | (headers or {}))
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to a malformed request with the usual headers, and without a page that repeats the text of the request."""
        self.close_connection = True
        self.command = self.command or "GET"
        self.request_version = "HTTP/1.1"
        self._refuse(HTTPStatus(code))

    def _send_file(self) -> None:
        size = self.server.size
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        requested = self.headers.get("Range")
        first, end, status = 0, size, HTTPStatus.OK
        # Other forms of ranges are ignored, as HTTP allows.
        match = _RANGE.fullmatch(requested) if requested is not None else None
        if match:
            first, last = int(match[1]), int(match[2] or size - 1)
            if first >= size or last < first:
                return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}"})
            end, status = min(last + 1, size), HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        self._start_response(status, headers | {"Content-Length": str(end - first)})
        while self.command == "GET" and first < end:
            piece = os.pread(self.server.descriptor, min(PIECE, end - first), first)
            if not piece:
                # The file was truncated, so the client gets fewer bytes than announced.
                self.close_connection = True
                break
            self.wfile.write(piece)
            first += len(piece)
        return None
