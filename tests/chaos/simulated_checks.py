"""What must be true of every simulated run, whatever went wrong in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from simulated_cases import LR, Case, Tiny

from paceline.errors import RunError
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.simulator.servers import Servers

# each push carries exactly the gradients of its own step
ONE_PUSH_A_STEP = ("adag", "agn", "async", "downpour-easy", "dynsgd", "hogwild", "sagn", "sync", "sync-rates")
ONE_PULL_A_PUSH = ("adag", "agn", "async", "downpour-easy", "dynsgd", "hogwild")
# where every gradient is all ones: how far one update moves x, in units of lr
REACH = {"async": 1, "agn": 1, "sync": 1, "sagn": 1, "allreduce": 1, "groups": 1, "sgd": 1}
REPLICAS = ("allreduce", "easgd")


class Broken(AssertionError):
    """A run that broke a law."""


def demand(true: bool, text: str) -> None:
    if not true:
        raise Broken(text)


class Watch:
    """Follows a run from outside, and checks it at its end."""

    def __init__(self, case: Case, faults: tuple[Fault, ...] | None = None) -> None:
        self.case = case
        self.run = run = case.engine(faults)
        self.rises = self.last = 0
        self.error: RunError | None = None
        self.counts: Counter[str] = Counter()
        recovery = run.recovery
        self._restore, self._written = recovery.restore, recovery.written
        recovery.restore = self._restored  # type: ignore[method-assign]
        recovery.written = self._was_written  # type: ignore[method-assign]

    def go(self) -> Watch:
        case, run = self.case, self.run
        try:
            run.run(case.updates, seconds=case.time_limit(), watch=self._updated)
        except RunError as error:
            self.error = error
            if run.recovery.returning:
                run.recovery.restore()
        return self

    def _updated(self, run: SimulationEngine) -> None:
        demand(run.updates > self.last, f"an update took the version from {self.last} to {run.updates}")
        self.rises += run.updates - self.last
        self.last = run.updates

    def _restored(self) -> None:
        run = self.run
        before = run.updates if run.servers else max(int(seat.worker.state.v) for seat in run.seats)
        rolled_back = run.recovery.rolled_back
        self.rises += before - self.last  # of the event in which a server died: nobody has been told of it
        self._restore()
        saved = run.recovery.newest
        self.last = run.updates
        demand(run.updates == saved.update, f"returned to update {run.updates}, not to {saved.update}")
        demand(run.recovery.rolled_back - rolled_back == before - saved.update, "updates rolled back are not counted")
        if saved.servers is not None:
            differ = [n for n, cell in saved.servers.cells.items() if not torch.equal(cell, run.centre.cell(n))]
            demand(not differ, f"the servers' cells {differ} are not those of the checkpoint")
        for seat, part in zip(run.seats, saved.parts, strict=True):
            differ = [n for n, cell in part.cells.items() if not torch.equal(cell, seat.worker.state.cell(n))]
            demand(not differ, f"worker:{seat.worker.rank}'s cells {differ} are not those of the checkpoint")
            demand(not seat.driver.running, f"worker:{seat.worker.rank} is still inside a step after a return")

    def _was_written(self, kept: Any) -> None:
        self._written(kept)
        saved = self.run.recovery.newest
        for rank, part in enumerate(saved.parts):
            demand(part.cells["v"] <= saved.update, f"worker:{rank}'s part is newer than the servers'")
        if self.case.processes:
            demand(len({part.t for part in saved.parts}) == 1, "an exact run's checkpoint is of several steps")
        self.counts["checkpoints"] += 1

    def check(self) -> Watch:
        """Everything that must hold at the end."""
        self._ended()
        self._accounts()
        self._versions()
        self._states()
        if self.run.scheduler is not None:
            self._staleness()
            self._servers()
        return self

    def _ended(self) -> None:
        case, run, error = self.case, self.run, self.error
        self.counts["returns"] += run.recovery.returns
        self.counts["updates rolled back"] += run.recovery.rolled_back
        self.counts["gradients"] += run.accounts.drawn
        self.counts["events"] += run.events
        if error is not None:
            demand(not case.must_reach(), f"it failed: {error}")
            told = str(error)
            known = ("deadlock", "no worker is left alive", "is dead")
            demand(any(text in told for text in known), f"it failed in a way that no fault explains: {told}")
            self.counts["runs that a death for good ended"] += 1
            return
        if run.updates != case.updates:
            demand(not case.must_reach(), f"{run.updates} of {case.updates} updates after {run.now:g} s")
            demand(run.updates < case.updates, f"{run.updates} updates were made, {case.updates} were asked for")
        demand(not run.recovery.returning, "it ended on its way back to a checkpoint")

    def _accounts(self) -> None:
        run, task = self.run, self.run.task
        assert isinstance(task, Tiny)
        if not run.watched:
            return
        account = run.accounts.closed(run.seats)
        demand(run.accounts.drawn == task.drawn, f"{task.drawn} gradients were drawn, {run.accounts.drawn} are counted")
        demand(sum(account.values()) == task.drawn, f"{account} are not the {task.drawn} gradients that were drawn")
        demand(min(account.values()) >= 0, f"a negative count: {account}")
        counted = account["used"] + account["dropped"]
        demand(run.gradients >= counted, f"{counted} gradients counted, but the run has only {run.gradients}")
        if not run.recovery.returns or run.servers is None:
            demand(run.gradients == sum(seat.gradients for seat in run.seats), "the workers' gradients do not add up")
            demand(run.samples == sum(seat.samples for seat in run.seats), "the workers' samples do not add up")
        if run.scheduler is None:
            return
        cells = run.scheduler.ledger.cells
        demand(
            account["dropped"] == self.case.window * cells.refused or self.case.scheme not in ONE_PUSH_A_STEP,
            f"{account['dropped']} gradients are counted as dropped, the server refused {cells.refused}",
        )
        if self.case.scheme in ONE_PUSH_A_STEP:
            used = self.case.window * cells.admitted
            demand(account["used"] == used, f"{account['used']} gradients count as used, the server took {used}")

    def _versions(self) -> None:
        run = self.run
        if run.servers is None and not self.case.processes:
            return  # the chief's deputy may be behind the dead
        rolled_back = run.recovery.rolled_back
        demand(
            self.rises == run.updates + rolled_back,
            f"{self.rises} updates were seen; there are {run.updates}, and {rolled_back} were rolled back",
        )

    def _states(self) -> None:
        case, run = self.case, self.run
        states = {"the centre": run.centre} | {f"worker:{seat.worker.rank}": seat.worker.state for seat in run.seats}
        for owner, state in states.items():
            for name in state:
                demand(bool(torch.isfinite(state.cell(name)).all()), f"{owner}'s {name} is not finite")
        whole = run.servers is None or not run.servers.behind  # a server may be dead for good
        if whole and not case.noise and case.scheme in REACH:
            x = run.scheme.model(run.centre)
            expected = torch.full_like(x, 4.0 - LR * REACH[case.scheme] * run.updates)
            demand(torch.equal(x, expected), f"{run.updates} updates by {LR} from 4 have led to {x.tolist()}")
        if case.scheme in REPLICAS:
            models = {
                int(seat.worker.v): run.scheme.model(seat.worker.state) for seat in run.seats if seat.worker.alive
            }
            for seat in run.seats:
                same = torch.equal(models.get(int(seat.worker.v), torch.empty(0)), run.scheme.model(seat.worker.state))
                demand(same or not seat.worker.alive, f"worker:{seat.worker.rank} has another model than the others")

    def _staleness(self) -> None:
        case, run = self.case, self.run
        assert run.scheduler is not None
        ledger = run.scheduler.ledger
        cells, histogram = ledger.cells, ledger.histogram()
        demand(sum(histogram.values()) == cells.admitted, "the staleness of some gradient is not counted")
        demand(sum(k * n for k, n in histogram.items()) == cells.total, f"staleness {histogram} is not {cells.total}")
        demand(min(histogram, default=0) >= 0, f"negative staleness: {histogram}")
        demand(int(cells.held.max()) <= run.updates, "a worker holds a version that does not exist")
        if not run.scheme.asynchronous:
            demand(set(histogram) <= {0}, f"a synchronous scheme has staleness {histogram}")
        if case.scheme in ONE_PULL_A_PUSH:
            most = run.updates * (case.workers - 1)
            sums = cells.total + ledger.outstanding(run.updates)
            demand(sums <= most, f"staleness {cells.total} and outstanding together are {sums}, above {most}")
            free = not case.network and not case.faults and case.scheme != "hogwild"
            demand(
                sums == most or not free, f"staleness and outstanding are {sums}, not {most}, in a run without faults"
            )

    def _servers(self) -> None:
        run = self.run
        assert run.servers is not None
        if run.servers.up and not run.servers.behind and not run.recovery.returning:
            demand(not differing(run.servers), f"servers disagree about {differing(run.servers)}")
            forgotten = run.servers._joining if not run.servers._mail else []
            demand(not forgotten, f"worker:{forgotten} waits to be counted again, and all servers have missed it")

    def everything(self) -> list[Any]:
        """All bits of the end, to compare with those of another run."""
        run = self.run
        found: list[Any] = [run.now, run.events, run.updates, run.gradients, run.samples, run.accounts]
        states = [run.centre, *(seat.worker.state for seat in run.seats)]
        if run.scheduler is not None:
            states.append(run.scheduler.ledger.cells)
        found += [(name, state.cell(name).numpy().tobytes()) for state in states for name in state]
        return [*found, [(seat.worker.t, seat.gradients, seat.worker.alive) for seat in run.seats], str(self.error)]


def differing(servers: Servers) -> list[str]:
    """Cells that several servers have and that are not alike, though all have performed the same calls."""
    lead, *others = servers._states
    vectors = servers.state.vectors(servers.engine.scheme.uncut)
    copies = [(name, state) for state in others for name in state if name not in vectors]
    return [name for name, state in copies if not torch.equal(state.cell(name), lead.cell(name))]


def harmless(case: Case) -> bool:
    """Whether the faults may change when things happen, but not what is computed: then the bits stay."""
    fixed = case.made()
    one_order = fixed.exact(case.workers) is None or (case.workers == 1 and case.scheme != "sync-repeat")
    deaths = [fault for fault in case.faults if fault.action == "kill"]
    between_calls = all(fault.role == "server" and fault.unit != "call" for fault in deaths)
    return bool(case.processes) or (one_order and between_calls)


def check(case: Case, *, repeat: bool) -> Counter[str]:
    """Run a case and hold it to all laws; `repeat`: twice, bit for bit."""
    watch = Watch(case).go().check()
    counts = watch.counts
    counts["runs"] += 1
    counts.update(
        f"{fault.action} {fault.role}" + (" inside a call" if fault.unit == "call" else "") for fault in case.faults
    )
    if repeat:
        again = Watch(case).go()
        counts["repeated runs"] += 1
        ours, theirs = watch.everything(), again.everything()
        demand(ours == theirs, "the same seed gave other bits the second time")
    if case.faults and watch.error is None and watch.run.updates == case.updates and harmless(case):
        calm = Watch(case, ()).go()
        counts["runs compared with the run without faults"] += 1
        bits, same = (w.run.scheme.model(w.run.centre).numpy().tobytes() for w in (watch, calm))
        demand(bits == same, "the faults changed the bits, and nothing in them may")
    return counts
