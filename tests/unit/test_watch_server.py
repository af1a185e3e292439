"""Who sees what of the page of `paceline watch`: nobody without the token sees anything."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.report.web import server as web
from paceline.report.web.access import REFUSAL, Access
from paceline.report.web.server import FILES, WatchServer
from paceline.report.web.watched_runs import WatchedRuns
from paceline.runs import stop_request
from paceline.runs.run_directory import RunDirectory

TOKEN = "a-token-of-the-tests"


class Client:
    """Requests to a server in a thread of this process."""

    def __init__(self, server: WatchServer, runs: Path) -> None:
        self.server, self.runs, self.port = server, runs, server.server_address[1]
        self.root = server.access.root
        self.host = f"127.0.0.1:{self.port}"

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        told = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return told

    def cookie(self) -> str:
        code, _, headers = self.ask(f"{self.root}?token={TOKEN}")
        assert code == 303
        assert headers["Location"] == self.root  # the token leaves the address bar
        return headers["Set-Cookie"].partition(";")[0]

    def json(self, name: str) -> dict[str, Any]:
        code, text, _ = self.ask(self.root + name, Cookie=self.cookie())
        assert code == 200, text
        told: dict[str, Any] = json.loads(text)
        return told


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    folder = tmp_path / "runs"
    folder.mkdir()
    with WatchServer(WatchedRuns([], [folder]), 0, Access(TOKEN)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Client(server, folder)
        server.shutdown()
        thread.join()


def made(folder: Path, name: str = "toy-sync") -> RunDirectory:
    run = RunDirectory.create(None, name, folder)
    run.write_plan({"task": "toy", "scheme": "sync", "workers": 2, "servers": 1, "steps": 100})
    (run.logs / "chief.log").write_text("first line\nlast line\n")
    return run


class TestWithoutTheToken:
    PATHS = ("", "/", "/index.html", "/favicon.ico", "/../../etc/passwd", "//", "/?token=wrong", "/?token=")

    @pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE"])
    def test_every_path_and_method_tells_one_sentence(self, client: Client, method: str) -> None:
        made(client.runs)
        own = [client.root + name for name in (*FILES, "runs", "log", "about", "stop", "static/page.js")]
        for path in (*self.PATHS, *own, f"{client.root}?token=wrong", client.root.rstrip("/")):
            code, text, headers = client.ask(path or "/", method)
            assert code == 403
            assert text in (REFUSAL + "\n", "")  # HEAD has no body
            assert {"Set-Cookie", "Server", "Access-Control-Allow-Origin", "Location"}.isdisjoint(headers)

    def test_a_wrong_cookie_and_a_wrong_header(self, client: Client) -> None:
        for headers in (
            {"Cookie": "paceline-watch="},
            {"Cookie": f"paceline-watch={TOKEN}"},
            {"Cookie": "other=1; paceline-watch"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {TOKEN}"},
        ):
            assert client.ask(f"{client.root}runs", **headers)[0] == 403

    def test_the_token_of_another_server(self, client: Client) -> None:
        other = Access("another token")
        assert other.root != client.root
        assert client.ask(f"{client.root}?token=another%20token")[0] == 403

    def test_what_is_no_http(self, client: Client) -> None:
        for sent in (b"\x16\x03\x01\x02\x00\x01\x00\n\n", b"GET\n\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70000 + b"\n"):
            with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                try:
                    while more := connection.recv(65536):
                        answer += more
                except ConnectionResetError:
                    pass
                assert b"toy" not in answer
                assert b"HTTP/1.1 403" in answer or not answer


class TestOtherSites:
    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.1@evil"]
    )
    def test_another_name_of_this_machine_is_refused_even_with_the_token(self, client: Client, host: str) -> None:
        """DNS rebinding: a stranger's name that leads to 127.0.0.1."""
        assert client.ask(f"{client.root}?token={TOKEN}", Host=host)[0] == 403
        assert client.ask(f"{client.root}runs", Host=host, Cookie=client.cookie())[0] == 403

    @pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "localhost", "[::1]:80"])
    def test_a_tunnel_may_have_another_port(self, client: Client, host: str) -> None:
        assert client.ask(f"{client.root}runs", Host=host, Cookie=client.cookie())[0] == 200

    def test_only_the_page_itself_may_stop_a_run(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr(stop_request, "stop", lambda run: asked.append(run.name) or "asked")
        key = self._key(client)
        own = {"Cookie": client.cookie(), "Content_Type": "application/json", "Origin": f"http://{client.host}"}
        body = json.dumps({"run": key})
        for wrong in (
            {"Origin": "http://evil.example"},
            {"Origin": f"http://127.0.0.1:{client.port + 1}"},
            {"Origin": "null"},
            {"Content_Type": "text/plain"},
            {"Sec_Fetch_Site": "same-site"},
            {"Cookie": ""},
        ):
            assert client.ask(f"{client.root}stop", "POST", body, **own | wrong)[0] == 403
        without = {name: value for name, value in own.items() if name != "Origin"}
        assert client.ask(f"{client.root}stop", "POST", body, **without)[0] == 403
        assert client.ask(f"{client.root}stop", **own)[0] == 404  # a link cannot stop a run
        assert asked == []
        assert client.ask(f"{client.root}stop", "POST", body, **own)[0] == 200
        assert asked == ["toy-sync-001"]

    @pytest.mark.parametrize("body", ["", "[]", "{}", '{"run": "../.."}', "[" * 4000, '"x"'])
    def test_a_request_to_stop_that_names_no_run(self, client: Client, body: str) -> None:
        own = {"Cookie": client.cookie(), "Content_Type": "application/json", "Origin": f"http://{client.host}"}
        assert client.ask(f"{client.root}stop", "POST", body, **own)[0] in (404, 409)

    @staticmethod
    def _key(client: Client) -> str:
        made(client.runs)
        return str(client.json("runs")["runs"][0]["key"])


class TestWithTheToken:
    def test_every_file_comes_from_here_alone(self, client: Client) -> None:
        for name in FILES:
            code, text, headers = client.ask(client.root + name, Cookie=client.cookie())
            assert code == 200
            assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert headers["Cache-Control"] == "no-store"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]

    def test_the_cookie_is_bound_to_a_path_that_nobody_guesses(self, client: Client) -> None:
        _, _, headers = client.ask(f"{client.root}?token={TOKEN}")
        assert f"Path={client.root}; HttpOnly; SameSite=Lax" in headers["Set-Cookie"]
        assert TOKEN not in headers["Set-Cookie"]
        assert client.root not in ("/", f"/{TOKEN}/")

    def test_the_token_as_a_header(self, client: Client) -> None:
        assert client.ask(f"{client.root}runs", Authorization=f"Bearer {TOKEN}")[0] == 200

    def test_no_run_then_one_then_two_then_one_is_deleted(self, client: Client) -> None:
        import shutil

        client.server.runs._kept.clear()
        assert client.json("runs")["runs"] == []
        made(client.runs)
        made(client.runs, "other")
        client.server.runs._kept.clear()
        told = client.json("runs")
        assert {one["name"] for one in told["runs"]} == {"toy-sync-001", "other-001"}
        keys = {one["name"]: one["key"] for one in told["runs"]}
        both = ",".join(keys.values())
        assert set(client.json(f"runs?show={both}")["shown"]) == set(keys.values())
        shutil.rmtree(client.runs / "other-001")
        client.server.runs._kept.clear()
        states = {one["name"]: one["state"] for one in client.json(f"runs?show={both}")["runs"]}
        assert states == {"toy-sync-001": "broken off", "other-001": "deleted"}

    def test_logs_are_named_and_nothing_else_is_read(self, client: Client) -> None:
        run = made(client.runs)
        (run.path / "secret").write_text("not a log")
        (run.logs / "link.log").symlink_to(run.path / "secret")
        key = client.json("runs")["runs"][0]["key"]
        assert client.json(f"log?run={key}&file=chief.log")["text"] == "first line\nlast line\n"
        for name in ("..%2Fsecret", "%2Fetc%2Fpasswd", "link.log", "", "..%2F..%2Fruns%2Ftoy-sync-001%2Fsecret"):
            assert client.json(f"log?run={key}&file={name}")["text"] == ""
        assert client.json("log?run=none&file=chief.log")["text"] == ""

    def test_the_listing_of_the_scheme(self, client: Client) -> None:
        made(client.runs)
        about = client.json(f"about?run={client.json('runs')['runs'][0]['key']}")
        assert about["plan"]["task"] == "toy"
        assert "async def step" in about["scheme"]["source"]
        assert about["scheme"]["doc"]

    def test_what_does_not_exist(self, client: Client) -> None:
        assert client.ask(f"{client.root}nothing", Cookie=client.cookie())[0] == 404
        assert client.ask(f"{client.root}static/../server.py", Cookie=client.cookie())[0] == 404


def test_a_taken_port_is_named(client: Client) -> None:
    with pytest.raises(UsageError, match=rf"port {client.port} is taken"):
        WatchServer(WatchedRuns([], []), client.port)
    with pytest.raises(UsageError, match="no port 70000"):
        WatchServer(WatchedRuns([], []), 70000)


def test_a_server_with_all_connections_in_use_closes_further_ones(client: Client) -> None:
    held = [socket.create_connection(("127.0.0.1", client.port), timeout=30) for _ in range(web.CONNECTIONS)]
    try:
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as further:
            assert further.recv(1) == b""
    finally:
        for one in held:
            one.close()


class TestStop:
    def test_a_run_that_does_not_run(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is not running"):
            stop_request.stop(made(tmp_path))

    def test_the_process_of_the_lock_is_signalled_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[int] = []
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: sent.append(number))
        run = made(tmp_path)
        runs = WatchedRuns([run.path])
        key = runs.overview([])["runs"][0]["key"]
        with run.lock():
            assert "asked to end with a checkpoint" in runs.stop(key)
            assert "has been asked" in runs.stop(key)  # a second signal would end the run at once
            runs._kept.clear()
            assert runs.overview([])["runs"][0]["asked"]
        assert sent == [signal.SIGINT]

    def test_several_that_ask_at_once_send_one_signal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[int] = []
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: sent.append(number))
        run = made(tmp_path)
        (run.path / stop_request.REQUEST).write_text("1 1\n")  # of an earlier launch
        said: list[str] = []
        with run.lock():
            asking = [threading.Thread(target=lambda: said.append(stop_request.stop(run))) for _ in range(8)]
            for one in asking:
                one.start()
            for one in asking:
                one.join()
        assert sent == [signal.SIGINT]
        assert sum("has been asked to end already" in one for one in said) == 7

    def test_a_launcher_that_could_not_be_asked_can_be_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object) -> None:
            raise PermissionError

        run, sent = made(tmp_path), list[int]()
        with run.lock():
            monkeypatch.setattr(signal, "pidfd_send_signal", refused)
            with pytest.raises(UsageError, match="no process of yours"):
                stop_request.stop(run)
            monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: sent.append(number))
            assert "asked to end with a checkpoint" in stop_request.stop(run)
        assert sent == [signal.SIGINT]

    def test_a_run_that_is_ending_gets_no_signal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(signal, "pidfd_send_signal")
        run = made(tmp_path)
        (run.path / "status.json").write_text('{"at": 0, "stopping": "interrupted"}')
        with run.lock():
            assert "ending already" in stop_request.stop(run)

    @pytest.mark.parametrize("text", ["1\n", "", "nonsense", "99999999"])
    def test_a_number_of_another_machine_is_not_signalled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        monkeypatch.delattr(signal, "pidfd_send_signal")
        run = made(tmp_path)
        with run.lock():
            (run.path / "lock").write_text(text)
            with pytest.raises(UsageError, match="no process of yours on this machine"):
                stop_request.stop(run)
