"""How a worker of a real run comes, goes back, and goes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from paceline.hook import Hook
from paceline.ops import Pending
from paceline.processes.calls.client import Stopped
from paceline.processes.calls.mailbox import SAVE, Mailbox
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import DONE, ENDING, FAILED, GENERATION, RUNNING, STOP, STOPPING, fence
from paceline.processes.roles import recorder
from paceline.processes.roles.hook_session import View
from paceline.processes.transport import Means
from paceline.result import digest
from paceline.runs.order_log import END
from paceline.runtime.step_driver import StepDriver
from paceline.state import State

FINAL = 1 << 40  # the number of the last snapshot,
LEFT = FINAL - 1  # and of the part of a worker that has left before it


class Membership(View):
    """Taking part and no longer taking part."""

    buffers: dict[str, Tensor]
    live: dict[str, Tensor]
    returns: int
    _counted: tuple[int, int]
    _state: State
    _means: Means
    _begun: list[Hook]
    _started: list[tuple[Pending[Any], Any]]
    _wanted: Pending[Any] | None
    life = 1  # how often this worker has been started
    _recorded_cells = False
    _untouched: tuple[int, ...] | None = None  # how often its cells had been written to when its step began

    def _enter(self) -> None:
        """A life begins: with the cells of the course that the run is on now, among those who are counted."""
        board, rank = self.board, self.rank
        while True:
            if self._rolled_back() or board.followed[rank] != self._generation:
                self._abandon()
                try:
                    self._return(noted=False)  # its log begins after it
                except Stopped:
                    if self._link is None:
                        raise
                    # a chief that comes back at the end must be counted: servers save for nobody else
            if self._link is not None:  # until then what it sends, and where the servers stand, is of the old course
                self.memory.wakeup.wait(self._servers_are_back)
            if not board.alive[rank]:
                self._join()
            self._refresh()  # the launcher may have set its cells back after this life had looked at them first
            if self._link is not None and board.run[STOP]:
                return  # it calls nothing any more: what the servers still perform was sent by its predecessor
            if self._record_start():
                return

    def _join(self) -> None:
        """Be counted again. Where there is no server, take over the cells of a worker that stands still."""
        board, rank, memory = self.board, self.rank, self.memory
        if self._link is None:
            board.joining[rank] = 1
            memory.wakeup.ring_all()
            others = [other for other in range(board.workers) if other != rank]

            def nobody() -> bool:
                return not any(board.alive[other] for other in others)

            means = self._means
            while (donor := means.invited()) is None and not nobody():
                memory.wakeup.wait(
                    lambda: bool(
                        board.grant[rank] or means.rung() or nobody() or board.run[STOP] or self._rolled_back()
                    ),
                    0.5,
                )
                if board.run[STOP]:
                    board.joining[rank] = 0
                    if not self.chief:
                        raise Stopped
                    memory.wakeup.wait(lambda: all(board.gone[other] for other in others))
            self._take_over(donor)
            self._record_cells()
        else:
            self._wait_until_missed()
        board.busy[rank] += board.busy[rank] % 2
        board.alive[rank] = 1
        fence()
        board.joining[rank] = board.grant[rank] = 0  # last: the donor stands still until this worker is counted
        memory.wakeup.ring_all()

    def _step_aside(self) -> None:
        """Not be counted for a while."""
        self.board.alive[self.rank] = 0
        self._means.step_aside()
        self.memory.wakeup.ring_all()

    def _wait_until_missed(self) -> None:
        """The servers must have seen that this worker was gone: until then a call of its predecessor may be under way,
        and what is posted now would be taken for it."""
        board, rank, wakeup = self.board, self.rank, self.memory.wakeup
        wakeup.wait(lambda: bool(not board.known[rank] or board.run[STOP]))
        ordered = board.get("ordered")  # that it has left is among these; a return to a checkpoint empties the order

        def missed() -> bool:
            return min(board.performed) >= min(ordered, board.get("ordered")) or bool(board.run[STOP])

        while not wakeup.wait(missed, 0.02):
            pass  # a server rings only for who is to have an answer: look now and then

    def _rolled_back(self) -> bool:
        return bool(self.board.run[GENERATION] != self._generation)

    def _take_over(self, donor: int | None) -> None:
        board, rank, memory = self.board, self.rank, self.memory
        if donor is None:  # nobody is left: the newest whole cells, or the last checkpoint
            whole = [r for r in range(board.workers) if not board.busy[r] % 2]
            if not whole:
                saved = snapshot.find(memory, board.get("checkpoint"))
                lost = self._state.v
                snapshot.restore_worker(memory, rank, saved)
                board.put("rolled_back", board.get("rolled_back") + max(lost - self._state.v, 0))
                self._refresh()
                return
            donor = max(whole, key=lambda r: int(memory.tensor(f"worker.{r}.v")))
        if donor != rank:
            self._state.restore(memory.worker_state(donor).saved())
            board.t[rank] = board.t[donor]
            for name, buffer in memory.buffers(donor).items():
                self.buffers[name].copy_(buffer)
        self._refresh()

    def _refresh(self) -> None:
        """The shared cells have changed under this worker."""
        self._untouched = None
        self.worker.t = self.board.t[self.rank]
        self._count()
        if self.worker.state is not self._state:
            self.worker.state.restore(self._state.saved())
            for name, buffer in self.buffers.items():
                self.live[name].copy_(buffer)

    def _count(self) -> None:
        """Between two steps: gradients of a step that is never finished do not count; they will be computed again."""
        self._counted = self.board.gradients[self.rank], self.board.samples[self.rank]

    def _abandon(self) -> None:
        self._driver.close()
        self._means.forget()
        if self._link is not None:
            self._link.forget()
        self._started.clear()
        self._wanted = None
        board = self.board
        board.busy[self.rank] += board.busy[self.rank] % 2

    def _return(self, *, noted: bool = True) -> None:
        """The run has gone back to a checkpoint: so does this worker, also when the run ends, or its part of the last
        checkpoint would be of the old course. `noted`: it is told in its log."""
        board, memory = self.board, self.memory
        self._writing = 0
        self._generation = -1
        while self._rolled_back():  # once more if somebody else dies meanwhile
            self._generation = generation = self._means.generation = board.get("generation")
            saved = snapshot.find(memory, board.get("restore"))
            if self._link is not None:
                self._link.generation = generation
                memory.wakeup.wait(self._servers_are_back)
            if board.run[STOP] == FAILED:
                raise Stopped
            if self._link is not None and not self._rolled_back():
                self._link.go_back(generation)
        snapshot.restore_worker(memory, self.rank, saved)
        self.worker.rng.set_state(memory.tensor(f"rng.{self.rank}"))
        self._refresh()
        board.followed[self.rank] = generation
        if self._link is not None and not memory.near(0):
            memory.save_overrides(saved.numbers["overrides"])  # as the first server does on its own node
        memory.load_overrides()
        self._driver = StepDriver(memory.scheme, self.worker)
        self.returns += 1
        if noted and self.journal is not None:
            self.journal.note({"return": generation})
            self.journal.flush()
        if board.run[STOP]:
            raise Stopped

    def _servers_are_back(self) -> bool:
        board = self.board
        back = all(one == self._generation for one in board.server_generation)
        return back or self._rolled_back() or bool(board.run[STOP] == FAILED)

    def finish(self) -> None:
        """Say goodbye. The chief goes last: it waits for the others, saves for the last time, and tells the result."""
        board, rank, wakeup = self.board, self.rank, self.memory.wakeup
        self._abandon()
        if self.journal is not None:
            self.journal.add(END)
            self.journal.flush()
        board.gradients[rank], board.samples[rank] = self._counted
        board.state[rank] = ENDING
        self._keep_last()
        others = [other for other in range(board.workers) if other != rank]
        board.parted[rank] = 1
        if not self.chief:
            self._end_hooks()
            board.alive[rank] = 0
            board.state[rank] = DONE
            board.gone[rank] = 1
            wakeup.ring_all()
            return
        if board.run[STOP] == RUNNING:  # it has left by itself: barriers must not wait for it
            board.alive[rank] = 0
            wakeup.ring_all()
            wakeup.wait(lambda: bool(board.run[STOP]) or all(board.gone[other] for other in others))
            board.alive[rank] = 1
            if board.run[STOP] == RUNNING:
                self._set_stop(STOPPING)
            wakeup.wait(lambda: all(board.gone[other] for other in others))
            if self._link is None:
                self._take_over(None)  # the others have gone on without it
                self._record_cells()
                self._keep(FINAL)
        wakeup.wait(lambda: all(board.gone[other] for other in others))
        if board.run[STOP] != FAILED:
            self._last_word()
            board.put("closing", 1)
            self._end_hooks()
            if self._link is None and not self.memory.plan.script and not snapshot.evened(self.memory, FINAL, LEFT):
                self._end_at_the_last_checkpoint()
                return
            snapshot.write(self.memory, self.task.buffer_policy, self._kept)
            self._record_checkpoint()
            if self.memory.plan.exact and not snapshot.common(self.memory):
                self.control.send(
                    {"warn": "the run was broken off between two steps: its last checkpoint is not exact"}
                )
            self.control.send({"result": {"metrics": {}}})  # should the evaluation not be waited for
            self.control.send({"result": {"metrics": self.evaluate()}})
        else:
            self._end_hooks()
        self._go_last()

    def _go_last(self) -> None:
        board, rank = self.board, self.rank
        board.put("over", 1)
        board.state[rank] = DONE
        board.alive[rank] = 0
        board.gone[rank] = 1
        self.memory.wakeup.ring_all()

    def _writes(self) -> tuple[int, ...]:
        state = self.worker.state
        return tuple(state.cell(name)._version for name in state)

    def _keep_last(self) -> None:
        """This worker's part of the last checkpoint. Where there is no server it must be of the step that all have
        ended with: one that was stopped inside a step says so, and one that is not counted has nothing to give."""
        board, left = self.board, self.board.run[STOP] == RUNNING
        if self._link is not None or self.memory.plan.script:  # of a script's steps nobody else knows
            self._keep_undisturbed(FINAL)
        elif not board.alive[self.rank]:
            board.saved[self.rank] = 0
        elif self._untouched is None or self._writes() == self._untouched:
            self._keep_undisturbed(LEFT if left and not self.chief else FINAL)
        elif not left:
            board.put("midway", 1)

    def _keep_undisturbed(self, number: int) -> None:
        """Put this worker's last part aside, but not while the chief writes the one before to disk."""
        board = self.board
        # from another node the part is sent once its number is there, so it must not come first
        if not self.chief and self.memory.beside(0):
            board.saved[self.rank] = number  # first: from now on the chief begins to write nothing
            fence()
            while not self.memory.wakeup.wait(lambda: bool(not board.get("saving") or not board.alive[0]), 0.05):
                pass
        self._keep(number)

    def _begin_to_write(self) -> bool:
        """The chief: hold what was put aside. False if somebody is about to end, and puts its last part there."""
        board = self.board
        board.put("saving", 1)
        fence()
        ending = any(n == FINAL or (n == LEFT and board.alive[rank]) for rank, n in enumerate(board.saved))
        if ending:
            board.put("saving", 0)
        return not ending

    def _end_at_the_last_checkpoint(self) -> None:
        """There is no common step to save: what is saved, evaluated and told is the checkpoint before."""
        saved = snapshot.find(self.memory, self.board.get("checkpoint"))
        text = "the run was stopped inside a step, and its workers have no common one"
        self.control.send({"warn": f"{text}: what is saved is the checkpoint of update {saved.step:,}"})
        self.control.send({"result": {"metrics": {}}})
        there = {name: buffer.to(self.device) for name, buffer in snapshot.saved_buffers(saved).items()}
        with self.turn:
            metrics = self.task.evaluate(saved.tensors["model"].to(self.device), there or None)
        self.control.send({"result": {"metrics": metrics}})
        self._go_last()

    def _last_word(self) -> None:
        """The servers' part of the last checkpoint. Should one of them die inside it, all go back once more."""
        board, link, memory = self.board, self._link, self.memory
        if link is None:
            return
        while board.run[STOP] != FAILED:
            if self._rolled_back():
                self._generation = link.generation = board.get("generation")
                memory.wakeup.wait(lambda: all(one == self._generation for one in board.server_generation))
                link.go_back(self._generation)
            behind = [rank for rank in range(board.workers) if board.followed[rank] != self._generation]
            saved = snapshot.find(memory, board.get("restore")) if behind else None
            for rank in behind:  # they have gone, or will not come back: their parts go back with the servers'
                assert saved is not None
                snapshot.restore_worker(memory, rank, saved)
                snapshot.keep_worker(memory, rank, None)
                board.followed[rank] = self._generation
            mailbox = link.ask(SAVE)

            def heard(at: Mailbox = mailbox) -> bool:
                return link.ready(at) or self._rolled_back() or board.run[STOP] == FAILED

            memory.wakeup.wait(heard)
            if not self._rolled_back():
                return
            link.forget()

    def failed(self, error: BaseException) -> None:
        """The run broke off here: hooks hear of it, and everybody else ends."""
        with ExitStack() as rest:
            rest.callback(self._end_hooks)
            for hook in self._begun:
                rest.callback(hook.failed, self, error)

    def _end_hooks(self) -> None:
        hooks, self._begun = self._begun, []
        with ExitStack() as ends:  # every end runs, in reverse order, whatever another one raises
            for hook in hooks:
                ends.callback(hook.end, self)

    def _record_start(self) -> bool:
        """A life begins: its log says where, and with which cells if they are not those of the start. False if the run
        has gone back meanwhile: the servers' position is no longer one of this worker's generation."""
        position = int(self.board.performed[0])
        fence()
        if self._rolled_back():
            return False
        if self.journal is None:
            return True
        if not self._recorded_cells:
            self._record_cells(position, first=self.life == 1 and not self._generation)
        self._means.journal = self.journal
        if self._link is not None:
            self._link.journal = self.journal
        return True

    def _record_cells(self, position: int = 0, *, first: bool = False) -> None:
        """Where this worker stands, and what it holds: whoever repeats the run cannot know what the dead had done."""
        if self.journal is None:
            return
        board, rank, self._recorded_cells = self.board, self.rank, True
        self._mirror()
        name = None if first else recorder.save_cells(self.memory, rank, self.life, self.worker._rng)
        told = {
            "t": board.t[rank],
            "v": int(self._state.v),
            "gradients": board.gradients[rank],
            "overrides": self.memory.load_overrides(),
        }
        place = {"generation": self._generation, "position": position, "cells": name}
        self.journal.note(told | place)
        self.journal.flush()

    def _record_checkpoint(self) -> None:
        if self.journal is not None:
            model = snapshot.model_of(self.memory, prefix=snapshot.KEEP)
            told = {"checkpoint": self.board.get("checkpoint"), "digest": digest(model)}
            self.journal.note(told | {"generation": self._generation})
            self.journal.flush()

    def _keep(self, number: int) -> None:
        self._mirror()
        snapshot.keep_worker(self.memory, self.rank, self.worker._rng)
        self.board.saved[self.rank] = number

    def _mirror(self) -> None:
        """What lies on another device is gone with the process: keep the cells of a finished step in shared memory."""
        if self.worker.state is not self._state:
            for name in self._state:
                if self._state.cell(name).dim():
                    self._state.cell(name).copy_(self.worker.state.cell(name))
            for name, buffer in self.live.items():
                self.buffers[name].copy_(buffer)
