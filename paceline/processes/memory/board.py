"""The board: words in shared memory that every process of a run can read.

Each word has one writer at a time: the worker or server whose row it is, the chief, or the launcher. So no lock is
needed. The launcher holds the memory: what stands here survives any other process.
"""

from __future__ import annotations

import _thread
import time
from typing import ClassVar

from paceline.processes.memory.segment import WORD, Segment, anonymous

MAILBOXES = 4  # calls that one worker may have under way
RING = 4096  # calls whose order the lead server has fixed and another may not have performed yet

# what the word `stop` says
RUNNING, STOPPING, FAILED = range(3)
# what a role is doing
STARTING, TRAINING, WAITING, ENDING, DONE = range(5)

_lock = _thread.allocate_lock()


def fence() -> None:
    """All that was written before is seen by others before anything is read after: a lock has that by its nature."""
    _lock.acquire()
    _lock.release()


class Board:
    """Every word by name: one of the whole run, or one per worker, server, or role."""

    RUN: ClassVar = (
        "stop",  # RUNNING, STOPPING or FAILED
        "interrupted",  # the launcher has been asked to end the run, by a signal
        "closing",  # the chief has all parts of the last checkpoint: what is left takes its time
        "over",  # the last checkpoint is written: servers and evaluator may go
        "ready",  # the chief has laid out and filled the state's memory
        "joined",  # everybody has joined, or is no longer waited for: the first steps may begin
        "size",  # of that memory
        "generation",  # rises each time that the run goes back to a checkpoint
        "restore",  # the checkpoint it goes back to
        "rolled_back",  # updates lost that way, in earlier launches too
        "restarts",  # of all roles, in earlier launches too
        "goal",  # the last update, -1 without one
        "snapshot",  # number of the checkpoint that is wanted
        "snapshot_version",  # where there is no server: taken when the common version is this
        "asked",  # rises when the launcher wants a checkpoint
        "checkpoint",  # step of the newest checkpoint, -1 before the first,
        "written",  # and when it was written, ns
        "began",  # when the launcher began, ns
        "first_step",  # when the first gradient was there, ns
        "stopped",  # when the stop came, ns
        "ordered",  # calls that the lead server has put in order
        "halt",  # with `exact`, or without a server: the run is to be brought to its end at the next common step
        "saving",  # the chief writes what the workers have put aside: nobody changes it meanwhile
        "midway",  # without a server: a worker was stopped inside a step, so there is no common last step to save
        "cut",  # with `exact`: number of the last snapshot that holds the servers' part
        "uncut",  # with `exact`: a worker died while the run ended, so the last snapshot is of no common step
        "alarm",  # rises at each death, so that whoever waits looks again
        "notice",  # rises when the chief has written what every node must know before it goes on
    )
    WORKER: ClassVar = (
        "alive",  # takes part: barriers wait for it
        "pid",
        "state",
        "t",
        "gradients",
        "samples",
        "saved",  # number of the last snapshot that it has taken
        "known",  # the lead server counts it among those present
        "begun",  # has begun its first step once
        "parted",  # will not come back: no barrier waits for it, whatever the quorum
        "gone",  # has said goodbye
        "awaited",  # 1 + the lane whose answer it waits for
        "direct",  # updates it has made in the shared vector itself
        "busy",  # odd while its step runs: dying there may leave a cell half written
        "joining",  # is back and waits to be taken in
        "grant",  # 1 + the worker whose cells it may copy now
        "first_await",  # stands at the first mean of its step
        "at_key",
        "at_shape",
        "at_seq",
        "reduced",
        "finished",
        "row_valid",
        "unreached",  # since when it has not reached a server that listens, ns; 0: it reaches all,
        "unreached_server",  # and which one that is
        "node",  # where its process is
        "noticed",  # the last notice that its node has heard of
        "life",  # how often it has come, as a member of groups of torch.distributed,
        "lost",  # and up to which of these lives it is dead
        "followed",  # the generation that its cells are of: it, or the launcher for it, has gone back so often
        "called",  # how often it has put something down in the store for the others
    )
    SERVER: ClassVar = (
        "server_pid",
        "server_state",
        "mark",  # odd inside a call
        "performed",
        "server_generation",
        "server_node",  # where its process is,
        "server_high",  # and where workers of other nodes reach it: an IPv6 address in two words,
        "server_low",
        "server_port",  # and a port, 0 as long as nobody listens
        "server_noticed",
    )
    REALS: ClassVar = ("loss",)  # per worker, floating
    TIMES: ClassVar = ("began", "first_step", "stopped", "written")  # by the clock of the node that they are read on

    def __init__(self, descriptor: int, workers: int, servers: int) -> None:
        self.descriptor, self.workers, self.servers = descriptor, workers, servers
        self.roles = workers + servers + 2  # the evaluator and the launcher have bells too
        self.evaluator, self.launcher = workers + servers, workers + servers + 1
        self._segment = Segment(descriptor, self.size(workers, servers))
        self._at = 0
        self.run = self._words(len(self.RUN))
        self._starts: dict[str, int] = {}
        for name in self.WORKER:
            self._starts[name] = self._at
            setattr(self, name, self._words(workers))
        self.clocks = tuple(_RUN[name] for name in self.TIMES)  # which words are times
        for name in self.SERVER:
            setattr(self, name, self._words(max(servers, 1)))
        for name in self.REALS:
            setattr(self, name, self._reals(workers))
        # of a worker's last two means: one may be at the next while another still reads the last
        self.slot, self.weight = self._words(2 * workers), self._reals(2 * workers)
        self.joint = [self._words(workers) for _ in range(workers)]
        self.evaluator_words = self._words(4)
        self.common = self._at  # words before this are the same on every node; those after it are a node's own
        self.sleeping = self._words(self.roles)
        self.posted = self._words(workers * MAILBOXES)
        self.answered = [self._words(workers * MAILBOXES) for _ in range(max(servers, 1))]
        self.ring = self._words(RING)
        self.ring_numbers = self._words(RING)  # which call of a lane it is

    alive: memoryview
    pid: memoryview
    state: memoryview
    t: memoryview
    gradients: memoryview
    samples: memoryview
    saved: memoryview
    known: memoryview
    begun: memoryview
    parted: memoryview
    gone: memoryview
    awaited: memoryview
    direct: memoryview
    busy: memoryview
    joining: memoryview
    grant: memoryview
    first_await: memoryview
    at_key: memoryview
    at_shape: memoryview
    at_seq: memoryview
    reduced: memoryview
    finished: memoryview
    row_valid: memoryview
    unreached: memoryview
    unreached_server: memoryview
    server_pid: memoryview
    server_state: memoryview
    mark: memoryview
    performed: memoryview
    server_generation: memoryview
    node: memoryview
    life: memoryview
    lost: memoryview
    followed: memoryview
    called: memoryview
    server_node: memoryview
    server_high: memoryview
    server_low: memoryview
    server_port: memoryview
    noticed: memoryview
    server_noticed: memoryview
    loss: memoryview[float]

    @classmethod
    def size(cls, workers: int, servers: int) -> int:
        crew = max(servers, 1)
        words = len(cls.RUN) + workers * (len(cls.WORKER) + len(cls.REALS)) + crew * len(cls.SERVER)
        words += (
            4 * workers + workers + servers + 2 + workers * MAILBOXES * (1 + crew) + workers * workers + 2 * RING + 4
        )
        return words * WORD

    @classmethod
    def create(cls, workers: int, servers: int) -> Board:
        return cls(anonymous("paceline-board", cls.size(workers, servers)), workers, servers)

    def _words(self, count: int) -> memoryview:
        self._at += count
        return self._segment.words[self._at - count : self._at]

    def _reals(self, count: int) -> memoryview[float]:
        self._at += count
        return self._segment.floats[self._at - count : self._at]

    def get(self, name: str) -> int:
        """A word of the whole run."""
        value: int = self.run[_RUN[name]]
        return value

    def put(self, name: str, value: int) -> None:
        self.run[_RUN[name]] = value

    def stop(self, how: int) -> None:
        """Stop the run: STOPPING or FAILED, of which the graver stays. The time is written first: a process that sees
        the stop can read it."""
        if self.run[STOP] == RUNNING:
            self.put("stopped", time.monotonic_ns())
        if self.run[STOP] < how:
            self.put("stop", how)

    @property
    def words(self) -> memoryview:
        """All of them."""
        return self._segment.words

    def number(self, name: str, rank: int) -> int:
        """Which of all words a worker's word is."""
        return self._starts[name] + rank

    def mailbox(self, rank: int, number: int) -> int:
        return rank * MAILBOXES + number

    def server_place(self, shard: int) -> int:
        return self.workers + shard


_RUN = {name: index for index, name in enumerate(Board.RUN)}
STOP, GENERATION = _RUN["stop"], _RUN["generation"]
