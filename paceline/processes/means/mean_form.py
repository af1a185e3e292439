"""What is the same in all means of one kind, and what belongs to one mean.

After a gradient a core's caches hold nothing of this code, and every line of it waits for memory. So what is the same
in most means is kept in a `MeanForm`, and compared as a whole: the usual case takes few steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ops import Mean, Meet
from paceline.processes.means.vector_sums import VectorSum
from paceline.processes.memory.packed_words import mean_key, shape_word

TWO = 4 << 20  # bytes of a vector up to which two members each add up both
SMALL = 256 << 10  # bytes that a member of a larger group adds up beyond two vectors, rather than wait once more


def each_adds_all(size: int, members: int, *, on_gpu: bool = False) -> bool:
    """Whether each member adds up all vectors of `size` bytes; else it reduces a slice. On a GPU two members do: that
    moves as many bytes as two slices and their copies, and nobody waits for the other's slice."""
    if members <= 2:
        return on_gpu or size <= TWO
    return size * (members - 2) <= SMALL


class MeanForm:
    """What is the same in all means of vectors of one shape among one group."""

    def __init__(self, op: Mean | Meet, workers: int, rank: int, generation: int, *, on_gpu: bool = False) -> None:
        v, among = op.v, op.among
        self.kind, self.among, self.count, self.dtype, self.generation = type(op), among, v.numel(), v.dtype, generation
        self.members = tuple(range(workers)) if among is None else tuple(sorted(among))
        self.others = tuple(r for r in self.members if r != rank)
        self.everybody = len(self.members) == workers
        self.position = self.members.index(rank)
        self.size = v.numel() * v.element_size()
        # each member adds up all vectors, or takes from a meeting those that it wants
        self.whole = self.kind is Meet or each_adds_all(self.size, len(self.members), on_gpu=on_gpu)
        self.key, self.shape = mean_key(None if among is None else self.members, generation), shape_word(v)
        self.keys, self.shapes = [self.key] * workers, [self.shape] * workers
        self.sums: dict[tuple[int, ...], VectorSum] = {}  # of all members, by the offsets of their vectors

    def fits(self, op: Mean | Meet, generation: int) -> bool:
        v = op.v
        return (
            type(op) is self.kind
            and op.among == self.among
            and v.numel() == self.count
            and v.dtype is self.dtype
            and generation == self.generation
        )

    def bounds(self, number: int, present: int) -> tuple[int, int]:
        """The slice that one of the present members reduces."""
        return self.count * number // present, self.count * (number + 1) // present


class SharedMean:
    """A mean, or a meeting, that this worker has arrived at."""

    __slots__ = (
        *("form", "given", "key", "lead", "missing", "number", "op", "place", "present", "row", "step", "total"),
        *("undone", "weights"),
    )

    total: VectorSum
    given: Sequence[float]  # by those that take part: weights, or what they say at a meeting
    weights: Sequence[float] | None  # None: all are 1

    def __init__(self, op: Mean | Meet, form: MeanForm, key: int, number: int, place: int) -> None:
        self.op, self.form, self.key, self.number, self.place = op, form, key, number, place
        self.step = op.t if isinstance(op, Meet) else None  # nobody waits for a member that has finished it
        self.lead = -1  # the member that has decided
        self.missing = -1  # a member that was not here when this worker last looked
        self.row: list[int] = []  # the decision: by rank, the number of the mean of each worker that takes part
        self.present: tuple[int, ...] = ()  # these workers
        self.undone: list[int] = []  # members whose slices are not known to be reduced
