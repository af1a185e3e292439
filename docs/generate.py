"""Writes the generated pages of this folder from the code: `python docs/generate.py`, or `--check` to compare only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path

from paceline.cli.commands import COMMANDS, Command
from paceline.cli.signature import options_of
from paceline.config import discovery
from paceline.config.listing import SCHEME_FAMILIES
from paceline.config.options import Declared
from paceline.hook import Hook
from paceline.report.tables import parameter_rows

HERE = Path(__file__).resolve().parent
NOTE = "<!-- written by docs/generate.py: do not edit -->"
BEGIN, END = "<!-- options of ", "<!-- end -->"


def main() -> int:
    pages = {"schemes.md": schemes(), "tasks.md": tasks(), "hooks.md": hooks(), "command-line.md": command_line()}
    pages |= {"examples.md": examples(), "decisions/README.md": decisions()}
    stale = []
    for name, lines in pages.items():
        path, text = HERE / name, "\n".join(lines) + "\n"
        if "--check" in sys.argv[1:]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run 'make docs'")
    return 1 if stale else 0


def schemes() -> Iterator[str]:
    yield from ("# Schemes", "", NOTE, "")
    yield "`paceline show NAME` prints the same. Words are given as `key=value`. h is the curvature of a quadratic,"
    yield "x are the server's or common parameters, v their version, y a worker's own parameters, g is a gradient."
    yield "Vectors per gradient: what one worker sends and receives for each gradient that it computes, in vectors as"
    yield "long as x. A mean counts two (a ring of N workers sends 2 (N - 1) / N); a server sees the sum of all."
    families: dict[str, list[discovery.Member]] = {family: [] for family in SCHEME_FAMILIES}
    for found in discovery.schemes().values():
        families[found.value.family].append(found)
    for family, members in families.items():
        if not members:
            continue
        yield from ("", f"## {family.capitalize()}", "")
        yield from (
            "| name | what it does | good for | source | words and defaults | file |",
            "|---|---|---|---|---|---|",
        )
        for found in members:
            source = " ".join(found.doc.split("\n\n")[1].split()) if "\n\n" in found.doc else ""
            about, good = cell(found.summary), cell(found.value.good_for)
            yield f"| `{found.name}` | {about} | {good} | {cell(source)} | {words('schemes', found)} | `{found.file}` |"
        for found in members:
            yield from scheme(found)
    yield from ("", "## Update rules", "")
    yield "`rule=NAME` is the worker's (or the only) rule, `server.rule=NAME` the server's; options follow as"
    yield "`rule.OPTION=…` and `server.OPTION=…`. `lr` none means the scheme's `lr`."
    yield from ("", "| name | arithmetic (torch.optim's) | options and defaults |", "|---|---|---|")
    for found in discovery.FAMILIES["rules"]().values():
        yield f"| `{found.name}` | {cell(found.summary)} | {words('rules', found)} |"


def scheme(found: discovery.Member) -> Iterator[str]:
    """The listing of a scheme, and what follows from it."""
    _, *paragraphs = found.doc.split("\n\n")
    listings = [part for part in paragraphs[1:] if part.lstrip().startswith(("worker", "server"))]
    yield from ("", f"### {found.name}", "")
    if listings:
        yield from ("```", *"\n".join(listings).splitlines(), "```", "")
    for part in paragraphs[1:]:
        if part not in listings:
            yield from (*part.splitlines(), "")
    facts = {"Vectors per gradient": found.value.volume, "Stable for": found.value.limit}
    facts["Identities"] = found.value.equals
    for what, text in facts.items():
        if text:
            yield f"- {what}: {text}."


def tasks() -> Iterator[str]:
    yield from ("# Tasks, compute laws, data sets", "", NOTE, "", "## Tasks", "")
    yield "Options are given as `task.OPTION=value`."
    yield from ("", "| name | what it is | options and defaults | file |", "|---|---|---|---|")
    for found in discovery.tasks().values():
        yield f"| `{found.name}` | {cell(found.summary)} | {words('tasks', found)} | `{found.file}` |"
    yield from ("", "Hooks have a page of their own: [hooks.md](hooks.md).")
    yield from (
        "",
        "## Compute laws",
        "",
        "`--compute NAME:VALUE,VALUE` or `--compute NAME:key=VALUE`, in seconds.",
        "",
    )
    yield from ("| name | law | values and defaults |", "|---|---|---|")
    for found in discovery.FAMILIES["compute"]().values():
        yield f"| `{found.name}` | {cell(found.summary)} | {words('compute', found)} |"
    yield from ("", "## Data sets", "", "`paceline data NAME` gets one and tells where it lies.", "")
    yield from ("| name | what it is |", "|---|---|")
    for found in discovery.FAMILIES["data"]().values():
        yield f"| `{found.name}` | {cell(found.summary)} |"


def hooks() -> Iterator[str]:
    yield from ("# Hooks", "", NOTE, "")
    yield "`--hook NAME:key=value,key=value`, as often as needed; `paceline show NAME` says more of one. The chief is"
    yield "worker 0. How to add one: [add-a-hook.md](add-a-hook.md)."
    yield from ("", "| name | what it does | runs in | options and defaults |", "|---|---|---|---|")
    for found in discovery.hooks().values():
        roles = found.value.roles
        who = "every worker" if roles == Hook.roles else ", ".join(f"the {role}" for role in sorted(roles))
        yield f"| `{found.name}` | {cell(found.summary)} | {who} | {words('hooks', found)} |"


def command_line() -> Iterator[str]:
    commands = {command.name: command for command in COMMANDS}
    yield from rewritten("command-line.md", BEGIN, lambda name: options(commands[name]))


def examples() -> Iterator[str]:
    yield from rewritten("examples.md", "<!-- difference of ", difference)


def decisions() -> Iterator[str]:
    yield from ("# Decisions", "", NOTE, "")
    yield "Larger choices: what was decided, the alternatives, what it costs. [design.md](../design.md) is the result."
    yield ""
    for path in sorted((HERE / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({path.name})"


def rewritten(page: str, begin: str, part: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """A page with what is between its marks rewritten: `<!-- options of COMMAND: … -->` to `<!-- end -->`."""
    inside = False
    for line in (HERE / page).read_text(encoding="utf-8").splitlines():
        inside = inside and line != END
        if not inside:
            yield line
        if line.startswith(begin):
            inside = True
            yield from part(line.removeprefix(begin).partition(":")[0])


def difference(name: str) -> Iterator[str]:
    """Of an example to the plain script. Lines that are only indented differently are the same."""
    plain, ours = (
        (HERE.parent / "examples" / path).read_text(encoding="utf-8").splitlines()
        for path in (f"plain/{name}.py", f"{name}.py")
    )
    matcher = SequenceMatcher(None, [line.strip() for line in plain], [line.strip() for line in ours], autojunk=False)
    shown, removed, added = [], 0, 0
    for group in matcher.get_grouped_opcodes(1):
        shown += ["…"] if shown else []
        for kind, a, b, c, d in group:
            if kind == "equal":
                shown += [f" {line}" for line in ours[c:d]]
            else:
                shown += [f"-{line}" for line in plain[a:b]] + [f"+{line}" for line in ours[c:d]]
                removed += sum(bool(line.strip()) for line in plain[a:b])
                added += sum(bool(line.strip()) for line in ours[c:d])
    yield from (
        "",
        f"{removed} lines removed, {added} added; the other {len(ours) - added} stay, some indented further.",
    )
    yield from ("", "```diff", *(line.rstrip() for line in shown), "```", "")


def options(command: Command) -> Iterator[str]:
    panels: dict[str, list[Declared]] = {}
    for one in options_of(command):
        if not one.option.positional and not one.option.hidden:
            panels.setdefault(one.option.panel, []).append(one)
    for panel, declared in panels.items():
        yield from ("", f"| {panel.lower() or 'option'} | meaning | default |", "|---|---|---|")
        for one in declared:
            flags = ", ".join(f"`{flag}`" for both in one.flags for flag in both.split("/"))
            page = one.option.page
            more = f" ([{page}]({page}))" if page else ""
            yield f"| {flags} | {cell(one.option.help)}{more} | {cell(one.shown_default)} |"
    yield ""


def words(family: str, found: discovery.Member) -> str:
    return ", ".join(f"`{word}={default}`" for word, _, default in parameter_rows(family, found.value))


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
