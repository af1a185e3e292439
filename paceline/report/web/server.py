"""The HTTP server of `paceline watch`, on loopback. It reads run directories when a browser asks, and never else."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.errors import PacelineError, UsageError
from paceline.fields import finite
from paceline.report.web.access import REFUSAL, Access
from paceline.report.web.watched_runs import WatchedRuns

HOST = "127.0.0.1"
CONNECTIONS = 64  # at once; more are closed unread
TIMEOUT = 30.0  # seconds for which a connection may be silent
LONGEST_BODY = 4096
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "charts.js": ("charts.js", "text/javascript"),
    "run.js": ("run.js", "text/javascript"),
    "topology.js": ("topology.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of some runs to who has the token."""

    daemon_threads = True
    request_queue_size = CONNECTIONS
    block_on_close = False
    allow_reuse_address = True  # a port that was closed a moment ago; one that is listened at stays taken

    def __init__(self, runs: WatchedRuns, port: int = 0, access: Access | None = None) -> None:
        self.runs, self.access = runs, access or Access()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        try:
            super().__init__((HOST, port), PageRequest)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"port {port} is taken; name another one, or omit --port for any free one") from None
            raise UsageError(f"cannot listen at port {port} of {HOST}: {error.strerror}") from None
        except OverflowError:
            raise UsageError(f"there is no port {port}: ports are 0 to 65535") from None

    @property
    def address(self) -> str:
        return self.access.address(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer would ask the name service

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone is no error of ours."""


class PageRequest(BaseHTTPRequestHandler):
    """One connection. Whatever is asked for, who has no token is told one sentence."""

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True
    server: WatchServer

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, serve: Callable[[str], None]) -> None:
        access, path = self.server.access, urlsplit(self.path).path
        if not access.local(self.headers) or not path.startswith(access.root):
            self._refuse()
        elif self.command == "GET" and path == access.root and access.has_token(self.path):
            self._send(303, b"", "text/plain", {"Location": access.root, "Set-Cookie": access.cookie()})
        elif not access.admits(self.headers):
            self._refuse()
        else:
            serve(path.removeprefix(access.root))

    def _get(self, name: str) -> None:
        asked = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        runs = self.server.runs
        if name in FILES:
            file, kind = FILES[name]
            content = resources.files("paceline.report.web").joinpath("static", file).read_bytes()
            self._send(200, content, f"{kind}; charset=utf-8")
            return
        match name:
            case "runs":
                self._send_json(runs.overview([key for key in asked.get("show", "").split(",") if key]))
            case "log":
                self._send_json(runs.log(asked.get("run", ""), asked.get("file", "")))
            case "about":
                self._send_json(runs.about(asked.get("run", "")))
            case _:
                self._send(404, b"There is no such page.\n", "text/plain; charset=utf-8")

    def _post(self, name: str) -> None:
        length = self.headers.get("Content-Length", "")
        body = self.rfile.read(int(length)) if length.isdecimal() and int(length) <= LONGEST_BODY else b""
        plain = self.headers.get("Content-Type", "").partition(";")[0] == "application/json"
        if not self.server.access.own(self.headers) or not plain:
            self._refuse()
            return
        try:
            asked = json.loads(body)
            key = str(asked["run"]) if isinstance(asked, dict) else ""
        except (ValueError, KeyError, RecursionError):
            key = ""
        if name != "stop" or not key:
            self._send(404, b"There is no such page.\n", "text/plain; charset=utf-8")
            return
        try:
            self._send_json({"said": self.server.runs.stop(key)})
        except PacelineError as error:
            self._send_json({"said": str(error)}, 409)

    def _refuse(self) -> None:
        self.close_connection = True
        self._send(403, REFUSAL.encode() + b"\n", "text/plain; charset=utf-8")

    def _send_json(self, value: Any, code: int = 200) -> None:
        content = json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()
        self._send(code, content, "application/json")

    def _send(self, code: int, content: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response_only(code)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **HEADERS,
            **(more or {}),
        }.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A request that cannot be understood, or a method that is not known."""
        with_headers = self.request_version != "HTTP/0.9"
        self.close_connection = True
        if with_headers:
            self._send(403, REFUSAL.encode() + b"\n", "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address of a first visit has the token."""
