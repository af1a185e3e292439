"""The board: 64-bit words in shared memory that every process of a run can read.

Each word has one writer at a time, named beside it. So no lock is needed to write one. The supervisor holds the memory:
the words survive the death of any other process. The order of the declarations is the order in memory, on every node.
"""

from __future__ import annotations

import _thread
import time
from dataclasses import dataclass
from typing import Literal, cast

from paceline.processes.memory import robust_lock
from paceline.processes.memory.robust_lock import RobustLock
from paceline.processes.memory.segment import WORD, Segment, anonymous
from paceline.runs import shared_order_log

TIMES = 12  # words of what a role has spent its time on, in ns: roles/stopwatch.py
MAILBOXES = 4  # calls that one worker may have under way
LOCK = robust_lock.SIZE // WORD  # words
LINE = 64 // WORD  # words of a cache line
RING = 4096  # calls whose order the lead server has fixed and another may not have performed yet

# what the word `stop` says
RUNNING, STOPPING, FAILED = range(3)
# what a role is doing
STARTING, TRAINING, WAITING, ENDING, DONE = range(5)
STEPPING, EVALUATING, COMPILING = range(3)  # what a worker does now: people see it, no process acts on it

_lock = _thread.allocate_lock()


def fence() -> None:
    """All writes before are seen by other processes before any read after: acquiring a lock has that effect."""
    _lock.acquire()
    _lock.release()


@dataclass(frozen=True)
class Word:
    """A declared word. `clock`: a time in ns, by the clock of the node that reads it. `of_means`: it is in the cache
    lines that hold all that a worker writes at a mean."""

    meaning: str
    writer: str
    clock: bool = False
    per: Literal["run", "worker", "server"] = "run"
    of_means: bool = False


def per_worker(meaning: str, writer: str) -> memoryview:
    """Declare a word per worker; typed as what a board has under this name, as `dataclasses.field` is."""
    return cast("memoryview", Word(meaning, writer, per="worker"))


def at_means(meaning: str, writer: str) -> memoryview:
    """Declare a word per worker that is used at means."""
    return cast("memoryview", Word(meaning, writer, per="worker", of_means=True))


def per_server(meaning: str, writer: str) -> memoryview:
    return cast("memoryview", Word(meaning, writer, per="server"))


class RunWords:
    """Words of the whole run: `board.get(name)` and `board.put(name, value)`."""

    stop = Word("RUNNING, STOPPING or FAILED; only rises", "any process, by Board.stop")
    interrupted = Word("a signal has asked the supervisor to end the run", "supervisor")
    closing = Word("the chief has all parts of the last checkpoint, and has only to write and evaluate it", "chief")
    over = Word("the last checkpoint is written: servers and evaluator may end", "chief")
    ready = Word("the memory of the state is laid out and filled", "chief")
    joined = Word("every role has joined, or is not waited for any more: the first steps may begin", "supervisor")
    size = Word("bytes of the memory of the state", "chief")
    generation = Word("how often the run has returned to a checkpoint", "supervisor")
    restore = Word("step of the checkpoint that the run last returned to", "supervisor")
    rolled_back = Word("updates lost by returns, in earlier launches too", "supervisor; the last worker alive")
    restarts = Word("restarts of all roles, in earlier launches too", "supervisor")
    goal = Word("the last update; -1: none", "chief; the worker that names the step at which a halted run ends")
    snapshot = Word("number of the checkpoint that is wanted", "chief")
    snapshot_version = Word("the version, or with exact the step, at which a worker's part of it is taken", "chief")
    asked = Word("how many checkpoints the supervisor has asked for", "supervisor")
    checkpoint = Word("step of the newest checkpoint; -1 before the first", "chief; supervisor at a return")
    written = Word("when it was written", "chief", clock=True)
    began = Word("when the launch began", "supervisor", clock=True)
    first_step = Word("when the first gradient was computed", "the first worker", clock=True)
    stopped = Word("when the stop came", "any process, by Board.stop", clock=True)
    ordered = Word("calls that the lead server has put in order", "lead server")
    halt = Word("with exact, or without a server: the run is to end at the next common step", "hooks; supervisor")
    saving = Word("the chief writes the workers' parts of a checkpoint: they must not change", "chief")
    midway = Word("without a server: a worker was stopped inside a step, so there is no common last step", "workers")
    cut = Word("with exact: number of the last snapshot that has the servers' part", "chief")
    uncut = Word("with exact: a worker died while the run ended, so the last snapshot has no common step", "supervisor")
    alarm = Word("incremented when a process dies or stalls: waiting processes restart their patience", "supervisor")
    inside = Word("1 + the place of the process that last began a call under the server's lock", "that process")
    settings = Word("how often hooks or a return have changed the server's hyper-parameters", "who holds the lock")
    arrivals = Word("calls that have had to wait for their guards under the server's lock", "who holds the lock")
    notice = Word("incremented when the chief has written what every node must know before a step", "chief")


class Board:
    """Every word by name. A word per worker or server is a memoryview, indexed by rank or shard."""

    alive = per_worker("takes part: barriers wait for it", "the worker; supervisor when it dies")
    pid = per_worker("its process", "supervisor of its node")
    state = per_worker("STARTING to DONE", "the worker; supervisor when it dies")
    work = per_worker("STEPPING to COMPILING", "the worker; supervisor when it dies")
    t = per_worker("steps that it has finished", "the worker; supervisor when it restores it")
    gradients = per_worker("gradients that it has computed", "the worker; supervisor when it restores it")
    samples = per_worker("samples of these gradients", "the worker; supervisor when it restores it")
    sent = per_worker("bytes of vectors and numbers that it has sent", "the worker")
    received = per_worker("bytes of vectors and numbers that it has received", "the worker")
    uncompressed = per_worker("what `sent` would be without a compressor", "the worker")
    saved = per_worker("number of the last snapshot that it has taken part in", "the worker")
    known = per_worker("the lead server counts it among the present workers", "lead server")
    begun = per_worker("has begun its first step once", "the worker")
    parted = per_worker("will not come back: no barrier waits for it, whatever the quorum", "the worker; supervisor")
    gone = per_worker("has left the run", "the worker; supervisor when it gives it up")
    awaited = per_worker("what it waits for at a server: see packed_words", "the worker")
    direct = per_worker("updates that it has made in the shared vector itself", "the worker")
    busy = per_worker("odd while its step runs: if it dies then, a cell may be half written", "the worker")
    joining = per_worker("is restarted, and waits to take part", "the worker; supervisor when it dies")
    grant = per_worker("1 + the worker whose cells it may copy now", "that worker; the worker itself when done")
    at_key = at_means("which group's mean it has arrived at, and of which generation; 0: none", "the worker")
    at_shape = at_means("length and dtype of its vector there", "the worker")
    first_await = at_means("is at the first mean of its step", "the worker")
    at_seq = at_means("number of its last mean", "the worker")
    reduced = at_means("number of the last mean whose slice it has reduced", "the worker; one that does it for it")
    finished = at_means("number of the last mean that it has read", "the worker; supervisor when it dies")
    row_valid = per_worker(
        "0: its row of `joint` is not complete; else 1 + how many more means the same workers have taken", "the worker"
    )
    held = per_worker("waits until others have finished a mean that it was at", "the worker")
    unreached = per_worker("since when it has not reached a server that listens, ns; 0: it reaches all", "the worker")
    unreached_server = per_worker("which server that is", "the worker")
    node = per_worker("the node of its process", "supervisor")
    noticed = per_worker("the last notice that its node has", "its node")
    life = per_worker("how often it has joined groups for means on several nodes", "the worker")
    lost = per_worker("the last of these lives that is dead", "supervisor")
    followed = per_worker("the generation of its cells", "the worker; supervisor or chief when they restore it")
    called = per_worker("how often it has put something into the store for other workers", "the worker")

    server_pid = per_server("its process", "supervisor of its node")
    server_state = per_server("STARTING to DONE", "the server; supervisor when it dies")
    mark = per_server("odd inside a call", "the server; on one node, who holds its lock")
    performed = per_server("calls that it has performed", "the server; on one node, who holds its lock")
    server_generation = per_server("the generation of its state", "the server")
    server_node = per_server("the node of its process", "supervisor")
    server_high = per_server("where workers of other nodes reach it: upper half of an IPv6 address", "the server")
    server_low = per_server("lower half of the address", "the server")
    server_port = per_server("the port; 0: it does not listen", "the server; supervisor when it dies")
    server_noticed = per_server("the last notice that its node has", "its node")

    loss: memoryview[float]  # per worker: its last loss, written by the worker

    def __init__(self, descriptor: int, workers: int, servers: int) -> None:
        self.descriptor, self.workers, self.servers = descriptor, workers, servers
        self.roles = workers + servers + 2  # the evaluator and the supervisor are woken too
        self.evaluator, self.launcher = workers + servers, workers + servers + 1
        crew = max(servers, 1)
        self._segment = Segment(descriptor, self.size(workers, servers))
        self._at = 0
        self.run = self._words(len(RUN))
        self._starts: dict[str, int] = {}
        for name in WORKER:
            if not WORDS[name].of_means:
                self._starts[name] = self._at
                setattr(self, name, self._words(workers))
        for name in SERVER:
            setattr(self, name, self._words(crew))
        self.loss = self._reals(workers)
        # cache lines of each worker's own: a worker that waits for another's word is not disturbed by the rest
        self._at = -(-self._at // LINE) * LINE
        first, end = self._at, self._at + workers * MEAN_WORDS
        self._at = end
        # of a worker's last two means: one may be at the next while another still reads the last
        self.vector = [self._segment.words[first + half : end : MEAN_WORDS] for half in range(2)]
        self.weight: list[memoryview[float]] = [
            self._segment.floats[first + 2 + half : end : MEAN_WORDS] for half in range(2)
        ]
        for number, name in enumerate(OF_MEANS, 4):
            setattr(self, name, self._segment.words[first + number : end : MEAN_WORDS])
        self._joint_at = self._at
        self.joint = [self._words(workers) for _ in range(workers)]
        self.times = [self._words(TIMES) for _ in range(workers + crew)]  # of workers, then servers; by each itself
        self.evaluator_words = self._words(4)  # indexed by STATE, STEP, PID of roles/evaluator.py
        self.common = self._at  # words before this are the same on every node; those after it are a node's own
        self.sleeping = self._words(self.roles)
        self.posted = self._words(workers * MAILBOXES)
        self.answered = [self._words(workers * MAILBOXES) for _ in range(crew)]
        self.ring = self._words(RING)
        self.ring_numbers = self._words(RING)  # the numbers of these calls
        # under the server's lock: of calls that wait for their guards, the cells that these have read, and the arrival
        self.watched, self.arrived = self._words(workers * MAILBOXES), self._words(workers * MAILBOXES)
        # of each worker: it has still to copy rows of its last call, which it has released the lock of; by itself, and
        # the supervisor when it dies
        self.copying = self._words(workers)
        # of each worker: it copies x after it has released the lock; by itself, and the supervisor when it dies
        self.reading = self._words(workers)
        self.server_log = self._words(shared_order_log.WORDS)
        self._at = -(-self._at // LOCK) * LOCK  # a cache line of its own
        self._lock_at = self._segment.base + self._at * WORD

    @classmethod
    def size(cls, workers: int, servers: int) -> int:
        crew = max(servers, 1)
        shared = (
            len(RUN) + workers * (len(WORKER) + 1 + workers) + crew * len(SERVER) + TIMES * (workers + crew) + 4
        ) + (LINE + workers * (MEAN_WORDS - len(OF_MEANS)))
        own = workers * 3 + servers + 2 + workers * MAILBOXES * (3 + crew) + 2 * RING + shared_order_log.WORDS
        return (shared + own + 2 * LOCK) * WORD

    @classmethod
    def create(cls, workers: int, servers: int) -> Board:
        made = cls(anonymous("paceline-board", cls.size(workers, servers)), workers, servers)
        RobustLock.create(made._lock_at)
        return made

    def lock(self) -> RobustLock:
        """The server's lock: on one node, a process that calls the server performs the call while it holds this."""
        return RobustLock(self._lock_at)

    def _words(self, count: int) -> memoryview:
        self._at += count
        return self._segment.words[self._at - count : self._at]

    def _reals(self, count: int) -> memoryview[float]:
        self._at += count
        return self._segment.floats[self._at - count : self._at]

    def get(self, name: str) -> int:
        """A word of the whole run."""
        value: int = self.run[RUN[name]]
        return value

    def put(self, name: str, value: int) -> None:
        self.run[RUN[name]] = value

    def stop(self, how: int) -> None:
        """Stop the run: STOPPING or FAILED, of which the graver stays. The time is written first: a process that sees
        the stop can read it."""
        if self.run[STOP] == RUNNING:
            self.put("stopped", time.monotonic_ns())
        if self.run[STOP] < how:
            self.put("stop", how)

    @property
    def words(self) -> memoryview:
        """All words, in the order of memory."""
        return self._segment.words

    def number(self, name: str, rank: int) -> int:
        """The index among all words of a worker's word."""
        return self._starts[name] + rank

    def joint_column(self, rank: int) -> memoryview:
        """What every row of `joint` says of a worker."""
        return self._segment.words[self._joint_at + rank : self._joint_at + self.workers**2 : self.workers]

    def mailbox(self, rank: int, number: int) -> int:
        return rank * MAILBOXES + number

    def server_place(self, shard: int) -> int:
        return self.workers + shard


def _declared(home: type) -> dict[str, Word]:
    """The words that a class declares. They are taken out of it: reading an attribute of a board is faster without."""
    words = {name: word for name, word in vars(home).items() if isinstance(word, Word)}
    for name in words:
        delattr(home, name)
    return words


WORDS = _declared(RunWords) | _declared(Board)
RUN = {name: index for index, name in enumerate(name for name, word in WORDS.items() if word.per == "run")}
WORKER = [name for name, word in WORDS.items() if word.per == "worker"]
OF_MEANS = [name for name in WORKER if WORDS[name].of_means]
MEAN_WORDS = 2 * LINE  # of a worker: offsets and weights of its last two vectors, and these
SERVER = [name for name, word in WORDS.items() if word.per == "server"]
CLOCKS = [RUN[name] for name, word in WORDS.items() if word.clock]
STOP, GENERATION, GOAL, HALT = RUN["stop"], RUN["generation"], RUN["goal"], RUN["halt"]
ASKED, SNAPSHOT, BEGAN = RUN["asked"], RUN["snapshot"], RUN["began"]
INSIDE, SETTINGS = RUN["inside"], RUN["settings"]
