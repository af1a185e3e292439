"""Ways to break the simulator on purpose: a harness that finds none of them would find nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.runtime.call_scheduler import CallScheduler, Reply
from paceline.runtime.staleness import StalenessLedger
from paceline.schemes.sync import SyncSGD
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.fault_injection import FaultInjector
from paceline.simulator.means import SimulatedMeans
from paceline.simulator.recovery import SimulatedRecovery
from paceline.simulator.servers import Servers
from paceline.simulator.simulated_worker import Accounts

Put = Callable[[Any, str, Any], None]  # an owner, a name, what stands there now


def rolled_back_is_not_counted(put: Put) -> None:
    real = SimulatedRecovery.restore

    def restore(self: SimulatedRecovery) -> None:
        before = self.rolled_back
        real(self)
        self.rolled_back = before

    put(SimulatedRecovery, "restore", restore)


def an_answer_is_given_twice(put: Put) -> None:
    real = SimulationEngine.deliver_answers

    def deliver(self: SimulationEngine, answers: list[Reply]) -> None:
        real(self, answers)
        real(self, answers[:1] if self.events % 13 == 5 else [])

    put(SimulationEngine, "deliver_answers", deliver)


def a_call_is_performed_twice(put: Put) -> None:
    real = CallScheduler.submit

    def submit(self: CallScheduler, rank: int, call: Any, ticket: Any = None) -> list[Reply]:
        if call.method.silent and self.calls == 4:
            self.perform(rank, call, ticket)
        return real(self, rank, call, ticket)

    put(CallScheduler, "submit", submit)


def a_follower_omits_a_call(put: Put) -> None:
    real = CallScheduler.perform

    def perform(self: CallScheduler, rank: int, call: Any, ticket: Any = None) -> Reply:
        if call.method.silent and self.calls == 3:
            self.calls += 1
            return Reply(rank, ticket, None)
        return real(self, rank, call, ticket)

    put(CallScheduler, "perform", perform)


def gradients_of_the_dead_are_not_counted(put: Put) -> None:
    def died(self: Accounts, seat: Any) -> None:
        seat.fresh = 0

    put(Accounts, "died", died)


def gradients_survive_their_worker(put: Put) -> None:
    put(Accounts, "died", lambda self, seat: None)


def the_ledger_does_not_return(put: Put) -> None:
    put(StalenessLedger, "restore", lambda self, saved: None)


def batches_do_not_return(put: Put) -> None:
    real = SimulatedRecovery._restore

    def restore(self: SimulatedRecovery, seat: Any, part: Any) -> None:
        batches = seat.batches
        real(self, seat, part)
        seat.batches = batches

    put(SimulatedRecovery, "_restore", restore)


def messages_outlive_a_return(put: Put) -> None:
    real = SimulatedRecovery.tear

    def tear(self: SimulatedRecovery, shard: int | None, back: float = 0.0) -> None:
        real(self, shard, back)
        for seat in self._engine.seats:
            seat.generation -= 1

    put(SimulatedRecovery, "tear", tear)


def messages_outlive_their_sender(put: Put) -> None:
    real = FaultInjector.kill

    def kill(self: FaultInjector, rank: int) -> None:
        real(self, rank)
        self._engine.seats[rank].generation -= 1

    put(FaultInjector, "kill", kill)


def a_barrier_waits_for_the_dead(put: Put) -> None:
    put(SyncSGD, "left", lambda self, s, rank: None)


def a_mean_waits_for_the_dead(put: Put) -> None:
    put(SimulatedMeans, "left", lambda self, rank: [])


def calls_for_a_dead_server_are_lost(put: Put) -> None:
    real = Servers._taken

    def taken(self: Servers, take: Any) -> list[Reply]:
        return [] if self._still(0) else real(self, take)

    put(Servers, "_taken", taken)


def a_death_inside_a_call_is_ignored(put: Put) -> None:
    def tear(self: SimulatedRecovery, shard: int | None, back: float = 0.0) -> None:
        if shard is not None:
            servers = self._engine.servers
            assert servers is not None
            servers.spoil(shard)

    put(SimulatedRecovery, "tear", tear)


def an_exact_run_goes_on_without_the_dead(put: Put) -> None:
    real = SimulatedRecovery.__init__

    def init(self: SimulatedRecovery, engine: SimulationEngine, every: int, processes: int | None) -> None:
        real(self, engine, every, None)

    put(SimulatedRecovery, "__init__", init)


def an_exact_checkpoint_is_of_several_steps(put: Put) -> None:
    put(SimulatedRecovery, "_reached", lambda self, seat: True)


def the_returned_take_old_cells(put: Put) -> None:
    put(FaultInjector, "_take_over", lambda self, seat: True)


def who_is_back_is_forgotten(put: Put) -> None:
    put(Servers, "let_join", lambda self: None)


def a_pull_is_not_noted(put: Put) -> None:
    put(StalenessLedger, "pulled", lambda self, holder, version: None)


def time_never_heals_a_partition(put: Put) -> None:
    put(FaultInjector, "held", lambda self, seat, handler, payload: 1e9)


def the_second_draw_differs(put: Put) -> None:
    """Something that depends on what ran before in this process."""
    real, drawn = FaultInjector.late, [0]

    def late(self: FaultInjector, seat: Any, inward: bool, seconds: float) -> float:
        drawn[0] += 1
        return real(self, seat, inward, seconds + 1e-3 * (drawn[0] % 7))

    put(FaultInjector, "late", late)


MUTATIONS = [
    rolled_back_is_not_counted,
    an_answer_is_given_twice,
    a_call_is_performed_twice,
    a_follower_omits_a_call,
    gradients_of_the_dead_are_not_counted,
    gradients_survive_their_worker,
    the_ledger_does_not_return,
    batches_do_not_return,
    messages_outlive_a_return,
    messages_outlive_their_sender,
    a_barrier_waits_for_the_dead,
    a_mean_waits_for_the_dead,
    calls_for_a_dead_server_are_lost,
    a_death_inside_a_call_is_ignored,
    an_exact_run_goes_on_without_the_dead,
    an_exact_checkpoint_is_of_several_steps,
    the_returned_take_old_cells,
    who_is_back_is_forgotten,
    a_pull_is_not_noted,
    time_never_heals_a_partition,
    the_second_draw_differs,
]
SERVERLESS = {the_returned_take_old_cells}  # they change what happens without a server only
