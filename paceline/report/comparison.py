"""Tables of `paceline verify` and `paceline diff`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.run_tables import facts
from paceline.runs.diff import Difference
from paceline.runs.verify import Verification

MARKS = {True: Text("fits", "green"), False: Text("does not fit", "red"), None: Text("not known", "yellow")}


def verified(found: Verification) -> list[RenderableType]:
    """The checks, and the verdict as the last line."""
    rows = [(check.what, MARKS[check.fits], check.text) for check in found.checks]
    for name, (then, now) in found.versions.items():
        rows.append((name, Text("changed", "cyan"), f"the run had {_shown(then)}, here is {_shown(now)}"))
    wrong = dict.fromkeys(check.what for check in found.checks if check.fits is False)
    return [facts(found.run, rows), Text(f"not verified: {', '.join(wrong)}" if wrong else "verified")]


def parted(found: Difference) -> list[RenderableType]:
    """The differences, and the summary as the last line."""
    table = Table(title=" and ".join(found.runs), title_justify="left")
    for heading in ("", *found.runs):
        table.add_column(heading, overflow="fold", style="" if heading else "bold")
    for name, a, b in _rows(found):
        table.add_row(Text(name), Text(a), Text(b))
    lines = [*_way(found), *found.notes, summary(found)]
    return [table, *map(Text, lines)]


def summary(found: Difference) -> str:
    """Whether the bits are the same, and if not, the possible causes."""
    if found.same:
        return "same bits"
    causes = [name for name in ("config", "data", "versions") if getattr(found, name)]
    if causes:
        return f"other bits; what determined them differs in {', '.join(causes)}"
    if None in found.fingerprints:
        return "other bits"
    also = "" if found.order is not None else ", or the code is not the same"
    return f"other bits from the same fingerprint: the workers came in another order{also}"


def _rows(found: Difference) -> Iterator[tuple[str, str, str]]:
    yield from _pairs("", {"digest": found.digests, "fingerprint": found.fingerprints})
    yield "newest checkpoint", f"update {found.updates[0]:,}", f"update {found.updates[1]:,}"
    for part in ("config", "data", "versions"):
        yield from _pairs(part, getattr(found, part))
    yield from _pairs("", found.counts)
    if found.history is not None:
        yield from _pairs(f"update {found.history['update']:,}:", found.history["metrics"])


def _pairs(part: str, pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, str, str]]:
    for name, (a, b) in pairs.items():
        yield f"{part} {name}".strip(), _shown(a), _shown(b)


def _way(found: Difference) -> Iterator[str]:
    """Where the orders and the models of the runs first differ."""
    if found.order is not None and not found.same:
        (a, b), calls = found.runs, found.order
        yield f"the servers' calls part at number {calls['call']:,}: {calls['a']} in {a}, {calls['b']} in {b}"
    if found.model is not None:
        one = found.model
        since = "" if one.same_until is None else f" (at update {one.same_until:,} they are the same)"
        size = "" if one.largest is None else f", by {one.largest:.3g} at most"
        name = "" if one.parameter is None else f", the first in {one.parameter}"
        yield (f"the models differ at update {one.update:,}{since}: {one.numbers:,} of {one.of:,} numbers{size}{name}")
    elif not found.common:
        yield "the runs have no checkpoint of the same update"
    elif not found.same:
        yield f"the models are the same at every common checkpoint, up to update {found.common[-1]:,}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:16]}…" if len(value) == 64 else value  # a hash
    return "none" if value is None else json.dumps(value)
