"""Downloads that cannot hang: bounded in time and in size."""

from __future__ import annotations

import gzip
import io
import queue
import tarfile
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Protocol
from urllib.request import Request, urlopen

ANSWER_SECONDS = 4.0  # until a mirror must have answered, and the longest silence from then on
TOTAL_SECONDS = 300.0


class SourceError(Exception):
    """A source that cannot give what was asked of it; the message says why."""


class Sized(Protocol):
    """What is asked for: a name, and how many bytes it must be."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


def download(url: str, most: int) -> bytes:
    """What lies at the address, if it answers in time and is not longer than `most` bytes.

    A thread does it, for urllib's own time-out bounds neither the look-up of a name nor a trickling reply.
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


def gunzipped(url: str, files: Iterable[Sized]) -> Mapping[str, bytes]:
    """Files that lie below the address one by one, each gzipped."""
    content = {}
    for file in files:
        packed = download(f"{url}/{file.name}.gz", file.size + (1 << 16))
        try:
            with gzip.open(io.BytesIO(packed)) as stream:
                content[file.name] = stream.read(file.size + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{url}/{file.name}.gz cannot be unpacked: {error}") from error
    return content


def members(archive: io.BufferedIOBase, files: Iterable[Sized]) -> Mapping[str, bytes]:
    """Files out of a gzipped tar archive, known by the last part of their names; nothing goes to disk."""
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
