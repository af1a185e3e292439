"""Members of a family: by name, by file, by module."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import find, simulate
from paceline.errors import UnknownName, UsageError
from paceline.scheme import Scheme
from paceline.schemes.sync import SyncSGD
from paceline.task import Task
from paceline.tasks.toy import Toy

SCHEME = '''
from dataclasses import dataclass
from paceline.scheme import Scheme, on_server

@dataclass(frozen=True)
class Mine(Scheme, name="mine"):
    """A scheme of one's own."""
    lr: float = 0.1

    @on_server
    def push(self, s, g):
        s.x -= self.lr * g
        s.v += 1
        return s.x

    async def step(self, w):
        g = await w.grad()
        w.x = await self.push(g)

number = 5
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_own.py"
    path.write_text(SCHEME)
    return path


def test_by_name() -> None:
    assert find.scheme("sync") is SyncSGD
    assert isinstance(find.task("toy")(), Toy)
    assert set(find.FAMILIES) >= {"schemes", "tasks", "rules", "compute", "data"}
    for family in find.FAMILIES.values():
        members = family()
        assert list(members) == sorted(members)
        for name, member in members.items():
            assert member.name == name
            assert member.summary


def test_files_that_begin_with_an_underscore_are_not_members() -> None:
    assert "windowed" not in find.schemes()
    assert not any(name.startswith("_") for name in find.schemes())


def test_a_misspelt_name_suggests() -> None:
    with pytest.raises(UnknownName, match=r"no scheme 'downpor'; did you mean 'downpour'\?"):
        find.scheme("downpor")
    with pytest.raises(UnknownName, match=r"no task 'tooy'; did you mean 'toy'\?"):
        find.task("tooy")
    with pytest.raises(UnknownName, match=r"no scheme 'zzzzzz'; there are: adag, "):
        find.scheme("zzzzzz")
    with pytest.raises(UnknownName, match=r"did you mean 'adagrad'\?"):
        find.anything("adagrda")


def test_by_file(file: Path) -> None:
    scheme = find.scheme("my_own.py:Mine")
    assert issubclass(scheme, Scheme)
    assert scheme.name == "mine"
    assert find.scheme(f"{file}:Mine") is scheme  # one module per file, however it is named
    result = simulate("toy", "my_own.py:Mine", workers=2, steps=4)
    assert (result.scheme, result.updates) == ("mine", 4)
    family, found = find.anything("my_own.py:Mine")
    assert (family, found.summary, found.file) == ("schemes", "A scheme of one's own.", str(file))


def test_by_module() -> None:
    assert find.scheme("paceline.schemes.sync:SyncSGD") is SyncSGD
    assert find.task("paceline.tasks.toy:toy")().name == "toy"
    assert find.anything("paceline.tasks.toy:toy")[0] == "tasks"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:Mine", "no file 'nowhere.py' for the scheme (looked in "),
        ("my_own.py:Mien", "no scheme in my_own.py 'Mien'; did you mean 'Mine'?"),
        ("my_own.py:", "no scheme in my_own.py ''"),
        ("my_own.py:number", "'my_own.py:number' is not a scheme: it must name a subclass of paceline.Scheme"),
        ("no_such_module:Mine", "no module 'no_such_module' for the scheme; a file is named with its .py ending"),
        ("paceline.nothing:Mine", "no module 'paceline.nothing' for the scheme"),
        ("my_own:Mine", "a file is named with its .py ending"),
        ("folder/my_own:Mine", "a file is named with its .py ending"),
        ("paceline.schemes.sync:SynkSGD", "did you mean 'SyncSGD'?"),
        (":Mine", "no module '' for the scheme; write package.module:NAME or file.py:NAME"),
        (".sync:SyncSGD", "no module '.sync' for the scheme"),
    ],
)
def test_wrong_references_say_what_is_wrong(file: Path, reference: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find.scheme(reference)
    assert message in str(caught.value)


def test_a_task_by_reference(file: Path) -> None:
    (file.parent / "job.py").write_text(
        "from paceline.tasks.toy import toy\n"
        "def sized(size: int = 2):\n    return toy()\n"
        "ready = toy()\nbroken = 5\n"
        "def wrong():\n    return 7\n"
    )
    for name, options in (("sized", {"size": "3"}), ("ready", {})):
        assert simulate(f"job.py:{name}", "async", workers=2, steps=3, task_options=options).updates == 3
    for name, options, message in (
        ("sized", {"sise": "3"}, "no option of task job.py:sized 'sise'; did you mean 'size'?"),
        ("sized", {"size": "big"}, "size must be a whole number, not 'big'"),
        ("ready", {"size": "3"}, "is already made and takes no options, not size"),
        ("broken", {}, "'job.py:broken' is a int; a task is a paceline.Task or a function that makes one"),
        ("wrong", {}, "'job.py:wrong' gave a int, not a paceline.Task"),
    ):
        with pytest.raises(UsageError) as caught:
            simulate(f"job.py:{name}", "async", workers=2, steps=3, task_options=options)
        assert message in str(caught.value)


@pytest.mark.parametrize("text", ["1 / 0\n", "def (\n", "import no_such_thing_at_all\n", "raise SystemExit(3)\n"])
def test_a_broken_file_names_itself(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(BaseException) as caught:  # noqa: PT011  whatever the file itself raises
        find.scheme("my_own.py:Mine")
    frames, trace = [], caught.tb
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    names = [*frames, *getattr(caught.value, "__notes__", []), str(caught.value)]
    assert any("my_own.py" in name for name in names)
    file.write_text(SCHEME)
    assert find.scheme("my_own.py:Mine").name == "mine"  # a repaired file is read anew


def test_a_broken_member_names_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import paceline.schemes

    (tmp_path / "half_done.py").write_text("1 / 0\n")
    monkeypatch.setattr(paceline.schemes, "__path__", [*paceline.schemes.__path__, str(tmp_path)])
    with pytest.raises(ZeroDivisionError) as caught:
        find.schemes()
    assert caught.value.__notes__ == ["while reading paceline/schemes/half_done.py"]


def test_every_task_is_made_of_its_defaults_only() -> None:
    """Adding a file to the folder is enough: it needs no options to be tried."""
    for name, found in find.tasks().items():
        assert callable(found.value), name
    assert isinstance(find.tasks()["quadratic"].value(), Task)
