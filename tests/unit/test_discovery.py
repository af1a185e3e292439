"""Members of a family: by name, by file, by module."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from paceline import simulate, user_code
from paceline.config import discovery, registered
from paceline.errors import DataError, UnknownName, UsageError
from paceline.scheme import Scheme
from paceline.schemes.sync import SyncSGD
from paceline.signals import Interrupted
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
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # a console script has not the cwd
    path = tmp_path / "my_own.py"
    path.write_text(SCHEME)
    return path


def test_by_name() -> None:
    assert discovery.scheme("sync") is SyncSGD
    assert isinstance(discovery.task("toy")(), Toy)
    assert set(discovery.FAMILIES) >= {"schemes", "tasks", "rules", "compute", "data"}
    for family in discovery.FAMILIES.values():
        members = family()
        assert list(members) == sorted(members)
        for name, member in members.items():
            assert member.name == name
            assert member.summary
            assert member.error is None, f"{member.summary}: what is broken is held to no contract"


def test_files_that_begin_with_an_underscore_are_not_members() -> None:
    assert "windowed" not in discovery.schemes()
    assert not any(name.startswith("_") for name in discovery.schemes())


def test_a_misspelt_name_suggests() -> None:
    with pytest.raises(UnknownName, match=r"no scheme 'downpor'; did you mean 'downpour'\?"):
        discovery.scheme("downpor")
    with pytest.raises(UnknownName, match=r"no task 'tooy'; did you mean 'toy'\?"):
        discovery.task("tooy")
    with pytest.raises(UnknownName, match=r"no scheme 'zzzzzz'; there are: ace, "):
        discovery.scheme("zzzzzz")
    with pytest.raises(UnknownName, match=r"did you mean 'adagrad'\?"):
        discovery.anything("adagrda")


def test_by_file(file: Path) -> None:
    scheme = discovery.scheme("my_own.py:Mine")
    assert issubclass(scheme, Scheme)
    assert scheme.name == "mine"
    assert discovery.scheme(f"{file}:Mine") is scheme  # one module per file, however it is named
    result = simulate("toy", "my_own.py:Mine", workers=2, steps=4)
    assert (result.scheme, result.updates) == ("mine", 4)
    family, found = discovery.anything("my_own.py:Mine")
    assert (family, found.summary, found.file) == ("schemes", "A scheme of one's own.", str(file))


def test_by_module() -> None:
    assert discovery.scheme("paceline.schemes.sync:SyncSGD") is SyncSGD
    assert discovery.task("paceline.tasks.toy:toy")().name == "toy"
    assert discovery.anything("paceline.tasks.toy:toy")[0] == "tasks"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:Mine", "no file 'nowhere.py' for the scheme (looked in "),
        ("my_own.py:Mien", "no scheme in my_own.py 'Mien'; did you mean 'Mine'?"),
        ("my_own.py:", "no scheme in my_own.py ''"),
        ("my_own.py:number", "'my_own.py:number' is not a scheme: it must name a subclass of paceline.Scheme"),
        ("no_such_module:Mine", "no module 'no_such_module' for the scheme; a file is named with its .py ending"),
        ("paceline.nothing:Mine", "no module 'paceline.nothing' for the scheme"),
        ("folder/my_own:Mine", "a file is named with its .py ending"),
        ("paceline.schemes.sync:SynkSGD", "did you mean 'SyncSGD'?"),
        (":Mine", "no module '' for the scheme; write package.module:NAME or file.py:NAME"),
        (".sync:SyncSGD", "no module '.sync' for the scheme"),
    ],
)
def test_wrong_references_say_what_is_wrong(file: Path, reference: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        discovery.scheme(reference)
    assert message in str(caught.value)


def test_a_file_without_a_name_suggests_what_it_defines(file: Path) -> None:
    file.with_name("t.py").write_text(
        "from paceline.tasks.toy import toy\ndef other(): ...\ndef task(): return toy()\n"
    )
    for name, message in (
        ("t.py", "'t.py' is a file, not a task; did you mean 't.py:task'?"),
        ("nowhere.py", "no task 'nowhere.py'"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            discovery.task(name)
    with pytest.raises(UsageError, match=r"did you mean 'my_own\.py:Mine'\?"):
        discovery.scheme("my_own.py")
    with pytest.raises(UsageError, match=r"it defines no hook; write file\.py:NAME"):
        discovery.hook("t.py")


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


def test_a_module_of_the_current_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "beside_me.py").write_text(
        "def sized(size: int = 2):\n    from beside_too import it\n    return it()\n"
    )
    (file.parent / "beside_too.py").write_text("from paceline.tasks.toy import toy as it\n")
    for name in ("beside_me", "beside_too"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert simulate("beside_me:sized", "async", workers=2, steps=3).updates == 3
    assert simulate("beside_me.py:sized", "async", workers=2, steps=3).updates == 3
    assert sys.path.count(str(file.parent)) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero (line 2)"),
        ("def f():\n    return [][1]\n\n\nf()\n", "IndexError: list index out of range (line 2)"),
        ("import json\njson.loads('')\n", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)"),
        ("x = 1\ndef (\n", "SyntaxError: invalid syntax (line 2)"),
        ("import no_such_thing_at_all\n", "ModuleNotFoundError: No module named 'no_such_thing_at_all' (line 1)"),
        ("import half_written\n", "SyntaxError: invalid syntax (PLACE/half_written.py, line 1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (line 1)"),
        ("assert 1 > 2\n", "AssertionError (line 1)"),
    ],
)
def test_a_broken_file_says_where(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    (file.parent / "half_written.py").write_text("def (\n")
    with pytest.raises(UsageError) as caught:
        discovery.scheme("my_own.py:Mine")
    assert str(caught.value) == f"cannot read my_own.py: {told.replace('PLACE', str(file.parent))}"
    assert type(caught.value.__cause__).__name__ == told.partition(":")[0].partition(" ")[0]
    file.write_text(SCHEME)
    assert discovery.scheme("my_own.py:Mine").name == "mine"  # a repaired file is read anew


def test_a_broken_module_says_where(file: Path) -> None:
    (file.parent / "unfinished_one.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(UsageError) as caught:
        discovery.task("unfinished_one:task")
    place = file.parent / "unfinished_one.py"
    assert str(caught.value) == f"cannot read unfinished_one: ZeroDivisionError: division by zero ({place}, line 2)"
    (file.parent / "unfinished_two.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(UsageError, match="cannot read unfinished_two: ModuleNotFoundError: No module named 'no_such"):
        discovery.task("unfinished_two:task")


def test_an_error_of_paceline_in_a_file_stays_what_it_is(file: Path) -> None:
    file.write_text("from paceline.errors import DataError\n\nraise DataError('no pictures')\n")
    with pytest.raises(DataError, match="no pictures") as caught:
        discovery.task("my_own.py:task")
    assert caught.value.__notes__ == ["while reading my_own.py (line 3)"]


def test_only_what_could_be_meant_is_suggested(file: Path) -> None:
    file.write_text(
        SCHEME
        + "import torch\nfrom paceline import Hook, Scheme, Task, TorchTask\nfrom paceline.hooks.log import Log\n"
        + "from paceline.tasks.toy import dtype_named, toy\nready = toy()\ndef made(): return ready\n"
        + "def loss(output, target) -> float: return 0.0\nclass Watch(Hook): pass\nclass Own(type(ready)): pass\n"
    )
    for family, names in (
        ("task", "Own, made, ready, toy"),
        ("scheme", "Mine"),
        ("hook", "Log, Watch"),
    ):
        with pytest.raises(UnknownName) as caught:
            getattr(discovery, family)("my_own.py:qqqqqq")
        assert str(caught.value) == f"no {family} in my_own.py 'qqqqqq'; there are: {names}"
    with pytest.raises(UnknownName, match=r"there are: Log, Mine, Own, Watch, made, ready, toy$"):
        discovery.anything("my_own.py:qqqqqq")


def test_a_reference_belongs_to_the_family_of_what_it_is(file: Path) -> None:
    file.write_text(
        SCHEME
        + "from functools import partial\nfrom paceline import Hook, Task\nfrom paceline.rules import SGD\n"
        + "from paceline.compute_times import Pareto\nfrom paceline.tasks.toy import Toy, toy\n"
        + "class Watch(Hook): pass\nclass Rule(SGD): pass\nready = toy()\nlater = partial(toy)\n"
    )
    for name, family, where in (
        ("Mine", "schemes", str(file)),
        ("Watch", "hooks", str(file)),
        ("Rule", "rules", str(file)),
        ("Pareto", "compute", "paceline/compute_times.py"),
        ("ready", "tasks", "paceline/tasks/toy.py"),
        ("toy", "tasks", "paceline/tasks/toy.py"),
        ("Toy", "tasks", "paceline/tasks/toy.py"),
    ):
        got, found = discovery.anything(f"my_own.py:{name}")
        assert (got, found.file) == (family, where), name
    family, found = discovery.anything("my_own.py:later")
    assert family == "tasks"
    assert found.file
    with pytest.raises(UsageError, match=r"'my_own.py:number' is a int; there is something to show of a scheme, rule"):
        discovery.anything("my_own.py:number")
    assert discovery.Member("sum", sum).file == "?"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of schemes more, of which one is broken."""
    import paceline.schemes

    (tmp_path / "half_done.py").write_text("1 / 0\n")
    monkeypatch.setattr(paceline.schemes, "__path__", [*paceline.schemes.__path__, str(tmp_path)])
    return tmp_path


@pytest.mark.usefixtures("broken")
def test_a_broken_member_breaks_no_other() -> None:
    told = "cannot read paceline/schemes/half_done.py: ZeroDivisionError: division by zero (line 1)"
    assert discovery.scheme("sync") is SyncSGD
    assert discovery.anything("sync")[1].value is SyncSGD
    assert "half-done" not in discovery.schemes()
    assert discovery.schemes().keys() == discovery.FAMILIES["schemes"]().keys() - {"half-done"}
    assert discovery.FAMILIES["schemes"]()["half-done"].summary == told
    for ask in (discovery.scheme, discovery.anything):
        with pytest.raises(UsageError) as caught:
            ask("half-done")
        assert str(caught.value) == told
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(UnknownName) as caught:
            ask("half")  # perhaps it is the name of what that file defines
        assert caught.value.__notes__ == [told]


def test_members_that_cannot_be_made_are_broken(broken: Path) -> None:
    (broken / "half_done.py").write_text(
        "from paceline.scheme import Scheme, on_server\nclass Mine(Scheme):\n"
        "    @on_server\n    async def push(self, s): pass\n"
    )
    summary = discovery.FAMILIES["schemes"]()["half-done"].summary
    assert "'async def' under @on_server" in summary
    assert summary.endswith("; while reading paceline/schemes/half_done.py (line 3)")


def test_a_task_with_a_type_that_is_not_there_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import paceline.tasks

    (tmp_path / "untyped.py").write_text("from __future__ import annotations\ndef odd(n: Absent) -> Task: ...\n")
    monkeypatch.setattr(paceline.tasks, "__path__", [*paceline.tasks.__path__, str(tmp_path)])
    assert discovery.FAMILIES["tasks"]()["untyped"].summary == (
        "cannot read paceline/tasks/untyped.py: NameError: name 'Absent' is not defined"
    )
    assert "toy" in discovery.tasks()


def test_a_broken_entry_point_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("gone", "no_such_thing_at_all:Mine", "paceline.schemes"),
        EntryPoint("number", "math:pi", "paceline.schemes"),
        EntryPoint("other", "paceline.schemes.sync:SyncSGD", "paceline.schemes"),
    ]
    monkeypatch.setattr(registered, "entries", lambda group: [entry for entry in entries if entry.group == group])
    assert discovery.scheme("other") is SyncSGD
    assert {"gone", "number"} <= discovery.FAMILIES["schemes"]().keys() - discovery.schemes().keys()
    with pytest.raises(UsageError) as caught:
        discovery.scheme("gone")
    assert str(caught.value) == (
        "cannot read the entry point gone = no_such_thing_at_all:Mine of paceline.schemes: "
        "ModuleNotFoundError: No module named 'no_such_thing_at_all'"
    )
    with pytest.raises(UsageError, match=r"the entry point number = math:pi is not one of paceline.schemes"):
        discovery.scheme("number")


def test_every_task_is_made_of_its_defaults_only() -> None:
    """Adding a file to the folder is enough: it needs no options to be tried."""
    for name, found in discovery.tasks().items():
        assert callable(found.value), name
    assert isinstance(discovery.tasks()["quadratic"].value(), Task)


def test_a_signal_while_a_file_is_read_is_not_the_files_fault(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("from paceline.signals import Interrupted\nraise Interrupted\n")
    with pytest.raises(Interrupted):
        user_code.file("hook", path)
