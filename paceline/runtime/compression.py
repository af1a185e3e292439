"""Compresses what one worker sends, between its step and the world that performs its operations.

A call, a mean or a message of vectors that the scheme lists in `compresses` goes on with what their payloads decode to,
and with the payloads: worlds that share memory use the vectors, those that send bytes use the payloads. So the bits are
the same in all of them. A mean that the compressor takes by means of smaller vectors becomes those means, one after the
other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.compressed_sites import MEAN, MEET, SEND, Site
from paceline.compressor import Compressor, Pieces
from paceline.ops import Call, Mean, Meet, Op, Packed, Pending, Send, Sent, Start, nbytes
from paceline.sampling import mixed
from paceline.scheme import COMPRESSED_SHAPES, Scheme
from paceline.state import State, Vector
from paceline.worker import Worker


@dataclass(frozen=True)
class _Place:
    """What one site sends: whole vectors, or one of its fragments."""

    site: str
    compressor: Compressor
    state: State  # the compressor's cells
    shape: torch.Size
    names: tuple[str, ...]  # of those cells that are a worker's own


class Compression:
    """The compressor's side of one worker's step."""

    def __init__(self, scheme: Scheme, worker: Worker, compressor: Compressor) -> None:
        state = worker.state
        length = state.x.numel()
        sites = scheme.compressed(compressor.fitted_by(state.cell(COMPRESSED_SHAPES))).compressed_sites(length)
        assert sites is not None
        self._worker, self._sites = worker, sites
        self._combined = compressor.combined
        common = {"v": state.cell("v"), "workers": torch.tensor(worker.workers)}
        self._places: dict[tuple[str, int | None], _Place] = {}
        for site in (one for one in sites.sites if one.name != SEND):
            for number in sites.fragments():
                fitted, shape = sites.compressor(number), torch.Size([sites.length(number, length)])
                names = tuple(fitted.cells(torch.zeros(1)))
                cells = {name: state.cell(site.cell(name, number)) for name in names}
                over = State.over(cells | {"sent": state.cell(site.cell("sent"))} | common)
                own = tuple(name for name in names if name not in fitted.shared)
                self._places[site.name, number] = _Place(site.name, fitted, over, shape, own)
        self._receivers = _receivers(sites.compressor(None), state, common) if _sends(sites.sites) else []
        self._methods = _methods(scheme, sites.sites)
        # by means of pieces only where all workers have the same version of x and the same shared cells
        self._in_pieces = not scheme.methods
        self._pieces: tuple[Pieces, float] | None = None  # of the mean under way, and its weight
        # cells, and what they held before a mean of weight 0, or a message that may be refused
        self._uncounted: list[tuple[Tensor, Tensor]] = []
        self._votes = False  # the operation under way is a mean whose result the compressor combines
        # it is a meeting or a message: what the others do not get of this worker's vector
        self._lost: Vector | None = None
        self._sending = False  # it is a message

    def outgoing(self, op: Op[Any]) -> Op[Any]:
        """The operation that is performed instead."""
        self._pieces, self._votes, self._lost, self._sending = None, False, None, False
        match op:
            case Start(Meet() as inner):
                return Start(self._given(inner))
            case Start(Call() | Mean() as inner):
                return Start(self._packed(inner))
            case Meet():
                given = self._given(op)
                self._lost = given.lost
                return given
            case Pending(Meet() as inner):
                self._lost = inner.lost
            case Send() if self._receivers:
                return self._addressed(op)
            case Mean() if self._in_pieces and op.among is None and (place := self._place(op)) is not None:
                return self._begun(op, place)
            case Call() | Mean():
                self._votes = isinstance(op, Mean)
                return self._packed(op)  # type: ignore[no-any-return]
            case Pending():
                self._votes = isinstance(op.op, Mean) and op.op.packed is not None
        return op

    def incoming(self, answer: Any) -> tuple[Op[Any] | None, Any]:
        """The next operation of a mean in pieces; or None, and what the step gets."""
        if self._pieces is None:
            if self._sending:
                answer = self._left(bool(answer))
            elif self._lost is not None:
                answer = replace(answer, lost=self._lost)
            if self._votes:
                answer = self._combined(answer)
            self._votes, self._lost = False, None  # the next answer may be a gradient
            return None, answer
        pieces, weight = self._pieces
        try:
            return Mean(pieces.send(answer), weight, whole=True), None
        except StopIteration as end:
            self._pieces = None
            self._uncount()
            return None, self._combined(end.value)

    def _begun(self, op: Mean, place: _Place) -> Mean:
        # not the number of vectors sent: a worker that was away has sent fewer
        seed = mixed(self._worker.seed, "compress", place.state.v)
        pieces = place.compressor.pieces(place.state, op.v, seed)
        if pieces is None:
            self._votes = True
            packed: Mean = self._packed(op)
            return packed
        self._note(op, place)
        self._pieces = pieces, op.weight
        return Mean(next(pieces), op.weight, whole=True)

    def _place(self, op: Mean) -> _Place | None:
        """Where the vector of a mean is compressed; None: nowhere."""
        place = None if op.whole else self._places.get((MEAN, self._sites.fragment(op.fragment)))
        return place if place is not None and op.v.shape == place.shape else None

    def _given(self, op: Meet) -> Meet:
        """A meeting to which the worker brings a compressed vector; it keeps the rest."""
        place = self._places.get((MEET, None))
        if place is None or not (op.to or op.of) or op.v.shape != place.shape:
            return op
        payload, v = self._message(place, op.v)  # also if it only takes: then it knows the size of what will come
        return replace(op, v=v, packed=Packed({0: payload}), lost=op.v - v if op.to else None)

    def _addressed(self, op: Send) -> Send:
        """A message with a compressed vector."""
        place = self._receivers[op.to]
        self._uncounted = [(cell, cell.clone()) for cell in (place.state.cell(name) for name in place.names)]
        payload, v = self._message(place, op.v)
        self._sending, self._lost = True, op.v - v
        return replace(op, v=v, packed=Packed({0: payload}))

    def _left(self, leaves: bool) -> Sent:
        """Whether a message has left. Of one that has not, nothing was sent."""
        if not leaves:
            self._uncount()
        self._uncounted, self._sending = [], False
        return Sent(leaves, self._lost if leaves else None)

    def message_bytes(self) -> int | None:
        """The bytes of a compressed message, which is the same for all; None: messages are not compressed."""
        if not self._receivers:
            return None
        place = self._receivers[self._worker.rank]
        scratch = State.over({name: place.state.cell(name).clone() for name in place.state})
        return nbytes(place.compressor.encode(scratch, torch.ones_like(self._worker.state.x), 0))

    def _packed(self, op: Any) -> Any:
        if isinstance(op, Mean):
            place = self._place(op)
            if place is None:
                self._votes = False
                return op
            self._note(op, place)
            payload, v = self._message(place, op.v)
            self._uncount()
            members = self._worker.workers if op.among is None else len(op.among)
            shorter = members * nbytes(payload) < 2 * nbytes(v)  # sent, and received of the others
            return replace(op, v=v, packed=Packed({0: payload} if shorter else {}))
        args, payloads = list(op.args), {}
        for argument, site, number in self._methods.get(op.method.name, ()):
            v = args[argument]
            place = self._places.get((site, self._sites.fragment(None if number is None else int(args[number]))))
            if place is not None and isinstance(v, Tensor) and v.shape == place.shape:
                payloads[argument], args[argument] = self._message(place, v)
        return Call(op.method, tuple(args), Packed(payloads)) if payloads else op

    def _message(self, place: _Place, v: Vector) -> tuple[tuple[Any, ...], Vector]:
        """The payload of a vector, and what it decodes to."""
        worker = self._worker
        seed = mixed(worker.seed, "compress", worker.rank, place.site, place.state.sent)
        place.state.sent += 1
        return place.compressor.pack(place.state, v, seed)

    def _note(self, op: Mean, place: _Place) -> None:
        """Note the worker's own cells before a mean of weight 0: nothing of its vector enters the mean."""
        cells = [] if op.weight else [place.state.cell(name) for name in place.names]
        self._uncounted = [(cell, cell.clone()) for cell in cells]

    def _uncount(self) -> None:
        for cell, value in self._uncounted:
            cell.copy_(value)
        self._uncounted = []


def _sends(sites: list[Site]) -> bool:
    return any(site.name == SEND for site in sites)


def _receivers(compressor: Compressor, state: State, common: dict[str, Tensor]) -> list[_Place]:
    """Where messages are compressed, by their receivers."""
    site, names = Site.of(SEND), tuple(compressor.cells(torch.zeros(1)))
    found = []
    for rank in range(int(common["workers"])):
        cells = {name: state.cell(site.cell(name))[rank] for name in names}
        over = State.over(cells | {"sent": state.cell(site.cell("sent"))} | common)
        found.append(_Place(site.name, compressor, over, state.x.shape, names))
    return found


def _methods(scheme: Scheme, sites: list[Site]) -> dict[str, list[tuple[int, str, int | None]]]:
    """By method: the places of the arguments that are compressed, their sites, and the places of fragments' numbers."""
    found: dict[str, list[tuple[int, str, int | None]]] = {}
    for site in sites:
        if site.method:
            known = scheme.methods[site.method].parameters
            number = known.index(site.number) if site.number else None
            found.setdefault(site.method, []).append((known.index(site.argument), site.name, number))
    return found
