"""Imports Python code of the user, from a file or by a module's name; errors name the line that failed."""

import importlib
import importlib.util
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from paceline.errors import PacelineError, UnknownName, UsageError
from paceline.signals import Interrupted

T = TypeVar("T")

# files whose lines do not belong to the code of the user
_DISCOVERY = str(Path(__file__).with_name("config") / "discovery.py")
_READERS = {__file__, _DISCOVERY, importlib.__file__, metadata.__file__, typing.__file__}

# where code lies that is not the user's own
_LIBRARIES = (str(Path(__file__).parent), str(Path(typing.__file__).parent), "<frozen")
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


def attempt(what: str, read: Callable[..., T], *args: Any) -> T:
    """`read(*args)`; any error in it becomes a UsageError about `what`."""
    try:
        return read(*args)
    except PacelineError as error:  # its text is good; only the place is missing
        error.add_note(f"while reading {what}{_place(what, error)}")
        raise
    except Interrupted:  # a SystemExit too, but not raised by the file
        raise
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        told = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise UsageError(f"cannot read {what}: {told}{_place(what, error)}") from error


def file(kind: str, path: Path) -> ModuleType:
    """A file as a module. It can import from its own folder, as when Python runs it."""
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r} for the {kind} (looked in {Path.cwd()})")
    # one module per file, under any spelling of its path
    name = f"paceline_user_{blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _look_in(path.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        attempt(str(path), spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def module(kind: str, name: str) -> ModuleType:
    """A module by its name, also from the current directory."""
    if not name or name.startswith("."):
        raise UsageError(f"no module {name!r} for the {kind}; write package.module:NAME or file.py:NAME")
    _look_in(Path.cwd())
    try:
        return attempt(name, importlib.import_module, name)
    except UsageError as error:
        cause = error.__cause__
        absent = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise UsageError(f"no module {name!r} for the {kind}; a file is named with its .py ending") from None
        raise


def named(kind: str, where: str) -> ModuleType:
    """A module as references name it: `file.py` or `package.module`."""
    return file(kind, Path(where)) if where.endswith(".py") else module(kind, where)


def function(kind: str, reference: str) -> Callable[..., Any]:
    """A function by `file.py:NAME` or `package.module:NAME`."""
    where, colon, name = reference.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{reference!r} names no {kind}; write file.py:NAME or package.module:NAME")
    home = named(kind, where)
    found = getattr(home, name, None)
    if not callable(found):
        known = (key for key, value in vars(home).items() if callable(value) and not key.startswith("_"))
        raise UnknownName(f"{kind} in {where}", name, known)
    return found  # type: ignore[no-any-return]


def _look_in(folder: Path) -> None:
    """Add a folder to sys.path. It stays there: a function may import when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def last_frame(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame that runs code of the user: not of paceline, of a library, or of Python itself."""
    for one in reversed(list(frames)):
        if not one.filename.startswith(_LIBRARIES) and not _PACKAGES.search(one.filename):
            return one
    return None


def _place(what: str, error: BaseException) -> str:
    """Where the error was raised: the last line that ran of the first file that is not one of `_READERS`."""
    if isinstance(error, SyntaxError):
        found, line = error.filename, error.lineno
    else:
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        lines = [(name, line) for name, line in lines if name not in _READERS and not name.startswith("<")]
        found, line = next((one for one in reversed(lines) if one[0] == lines[0][0]), (None, None))
    if found is None or line is None:
        return ""
    return f" (line {line})" if Path(found).name == Path(what).name else f" ({found}, line {line})"
