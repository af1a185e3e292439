"""The order of calls and means with the times of the workers: where each call is drawn, and who ended a wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config.plan import Plan
from paceline.runs.call_times import CallTimes, Life, TimedOperation, Wait
from paceline.runs.order_history import History, WorkerLife
from paceline.runs.order_log import ROSE, LogRecord, MemberEvent, RecordKind

POST, CALL, READ, MEAN = RecordKind.POST, RecordKind.CALL, RecordKind.READ, RecordKind.MEAN


def launch(
    lives: Sequence[tuple[WorkerLife, Life]], server: Mapping[int, list[LogRecord]], plan: Plan | None = None
) -> CallTimes:
    """A launch with these lives of workers, and these actions of the server in each generation."""
    known: dict[int, list[Life]] = {}
    for recorded, life in lives:
        known.setdefault(recorded.rank, []).append(life)
    history = History(Path(), plan or Plan(), {}, dict(server), [recorded for recorded, _ in lives])
    return CallTimes(history, known)


def life(
    rank: int,
    records: Sequence[LogRecord],
    calls: Sequence[TimedOperation] = (),
    meetings: Sequence[TimedOperation] = (),
    *,
    number: int = 1,
    position: int = 0,
    returns: int = 0,
) -> tuple[WorkerLife, Life]:
    begun = {"generation": 0, "position": position}
    recorded = WorkerLife(rank, number, begun, list(records), False)
    return recorded, Life(number, 0.0, [], list(calls), list(meetings), returns)


def ended(found: CallTimes) -> dict[tuple[int, float, float], str]:
    """Who ended which wait; what it did for that is not after the wait."""
    causes = found.ended_waits()
    assert all(cause.at is None or cause.at <= end for (_, _, end), cause in causes.items())
    return {wait: cause.role for wait, cause in causes.items()}


def served(*calls: tuple[int, float, float, float | None, bool], plan: Plan | None = None) -> CallTimes:
    """Calls of the server's order, one of each worker: rank, start and end, the end of its wait since its start,
    whether x changed."""
    lives = [
        life(
            rank,
            [LogRecord(POST, (0,))],
            [TimedOperation(start, end, () if waited is None else (Wait(start, waited),))],
        )
        for rank, start, end, waited, _ in calls
    ]
    return launch(lives, {0: [LogRecord(CALL, (0, rank, ROSE * rose, 0)) for rank, *_, rose in calls]}, plan)


def means(
    *came: tuple[int, TimedOperation], decided: Mapping[tuple[int, int], dict[int, int]] | None = None, **plan: str
) -> dict[tuple[int, float, float], str]:
    """Who ended the waits of the first mean of these workers."""
    lives = [life(rank, [LogRecord(MEAN, (1,))], meetings=[timed]) for rank, timed in came]
    known = {recorded.rank: [own] for recorded, own in lives}
    history = History(Path(), Plan(**plan), {}, {}, [recorded for recorded, _ in lives])
    history.decided = dict(decided or {})
    return ended(CallTimes(history, known))


class TestTheServer:
    def test_a_call_is_performed_within_its_times_and_in_the_order(self) -> None:
        calls = served((0, 0, 9, None, True), (1, 2, 6, None, True), (2, 1, 8, 7, False), (3, 10, 11, None, True))
        row = [(one.start, one.end, one.by) for one in calls.served(["push"])]
        assert row == [(0, 3, "worker:0"), (3, 6, "worker:1"), (7, 8, "worker:2"), (10, 11, "worker:3")]

    def test_a_wait_is_ended_by_the_call_that_changed_x(self) -> None:
        calls = ((0, 0, 1, None, True), (1, 4, 5, None, True), (3, 4, 5.5, None, False), (2, 2, 6, 5.2, False))
        assert ended(served(*calls)) == {(2, 2, 5.2): "worker:1"}
        # without it by the last one; that of worker 0 was over before
        assert ended(served(calls[0], *calls[2:])) == {(2, 2, 5.2): "worker:3"}
        assert ended(served(calls[0], calls[3])) == {}

    def test_a_process_of_the_server_is_waited_for_where_no_other_worker_is(self) -> None:
        calls = ((0, 0, 1, None, True), (2, 2, 6, 5.2, False))
        assert ended(served(*calls, plan=Plan(servers=2))) == {(2, 2, 5.2): "server:0"}
        assert ended(served(*calls, plan=Plan(collective="tcp"))) == {(2, 2, 5.2): "server:0"}

    def test_a_wait_that_began_after_its_guard_was_true_was_ended_by_the_call_before_it(self) -> None:
        """A worker may lose its core between the moment at which it queues and the one at which it waits."""
        waits = TimedOperation(2, 6, (Wait(5, 5.1),))
        lives = [
            life(0, [LogRecord(POST, (0,))], [TimedOperation(3, 4)]),
            life(1, [LogRecord(POST, (0,))], [waits]),
        ]
        order = {0: [LogRecord(CALL, (0, 0, ROSE, 0)), LogRecord(CALL, (0, 1, ROSE, 0))]}
        assert ended(launch(lives, order)) == {(1, 5, 5.1): "worker:0"}

    def test_every_wait_of_a_call_is_looked_at(self) -> None:
        """For a lock, then for a guard."""
        waits = TimedOperation(1, 9, (Wait(1, 3), Wait(4, 8)))
        lives = [
            life(0, [LogRecord(POST, (0,))], [TimedOperation(0, 2.9)]),
            life(1, [LogRecord(POST, (0,))], [TimedOperation(7, 7.9)]),
            life(2, [LogRecord(POST, (0,))], [waits]),
        ]
        order = {0: [LogRecord(CALL, (0, rank, ROSE, 0)) for rank in (0, 1, 2)]}
        assert ended(launch(lives, order)) == {(2, 1, 3): "worker:0", (2, 4, 8): "worker:1"}

    def test_calls_of_several_generations_keep_their_times(self) -> None:
        """The last call before a return to a checkpoint was performed, but its worker heard of it no more."""
        back = LogRecord(RecordKind.NOTE, ({"return": 1, "t": 1},))
        records = [LogRecord(POST, (0,)), LogRecord(POST, (0,)), back, LogRecord(POST, (0,))]
        times = [TimedOperation(1, 2), TimedOperation(8, 9, returns=1)]
        call = LogRecord(CALL, (0, 0, ROSE, 0))
        found = launch([life(0, records, times, returns=1)], {0: [call, call], 1: [call]}).calls
        assert [(one.timed and one.timed.start) for own in found.values() for one in own.values()] == [1, None, 8]

    def test_a_return_before_the_first_step_is_not_in_the_log(self) -> None:
        times = [TimedOperation(8, 9, returns=1)]
        found = launch(
            [life(0, [LogRecord(POST, (0,))], times, returns=1)], {0: [LogRecord(CALL, (0, 0, ROSE, 0))]}
        ).calls
        assert found[0][0].timed == times[0]

    def test_calls_of_a_killed_worker_and_of_the_next_one_are_told_apart(self) -> None:
        """Its last call was performed, and has no time: the next one of its rank is of another process."""
        post, call = LogRecord(POST, (0,)), LogRecord(CALL, (0, 0, ROSE, 0))
        lives = [
            life(0, [post, post], [TimedOperation(1, 2)]),
            life(0, [post], [TimedOperation(8, 9)], number=2, position=3),
        ]
        left = LogRecord(RecordKind.MEMBER, (MemberEvent.LEFT, 0))
        found = launch(lives, {0: [call, call, left, call]}).calls[0]
        assert [found[at].timed and found[at].timed.start for at in sorted(found)] == [1, None, 8]

    def test_calls_that_only_read_are_between_the_others(self) -> None:
        records = [LogRecord(READ, (0, 0)), LogRecord(POST, (1,)), LogRecord(READ, (0, 1))]
        times = [TimedOperation(0, 1, detail=0), TimedOperation(2, 3, detail=1), TimedOperation(4, 7, (Wait(4, 6),))]
        other = life(1, [LogRecord(POST, (1,))], [TimedOperation(5, 5.5, detail=1)])
        order = {0: [LogRecord(CALL, (1, 1, ROSE, 0)), LogRecord(CALL, (1, 0, ROSE, 0))]}
        found = launch([life(0, records, times), other], order)
        assert found.calls[0][1].timed == times[1]
        assert ended(found) == {(0, 4, 6): "worker:1"}


class TestMeans:
    def test_a_wait_is_ended_by_the_member_that_came_last(self) -> None:
        came = (
            (0, TimedOperation(5, 9, (Wait(6, 8.5),))),
            (1, TimedOperation(8, 9)),
            (2, TimedOperation(7, 9, (Wait(7, 8.5),))),
        )
        assert means(*came) == {(0, 6, 8.5): "worker:1", (2, 7, 8.5): "worker:1"}
        # worker 1 was in another mean: worker 2 came last
        assert means(*came, decided={(0, 1): {0: 1, 2: 1}})[0, 6, 8.5] == "worker:2"

    def test_the_last_one_waits_for_the_lowest_to_decide(self) -> None:
        came = ((0, TimedOperation(1, 9, (Wait(2, 7),))), (1, TimedOperation(6, 9, (Wait(6.2, 8),))))
        assert means(*came) == {(0, 2, 7): "worker:1", (1, 6.2, 8): "worker:0"}
        # over a network nobody decides alone: the vectors were on their way
        assert means(*came, collective="tcp") == {(0, 2, 7): "worker:1"}

    def test_the_lowest_may_begin_to_wait_when_all_have_come(self) -> None:
        assert means((0, TimedOperation(1, 9, (Wait(6, 7),))), (1, TimedOperation(3, 9, (Wait(4, 8),)))) == {
            (0, 6, 7): "worker:1",
            (1, 4, 8): "worker:0",
        }

    def test_parts_are_waited_for_until_the_last_one_is_ready(self) -> None:
        came = (
            (0, TimedOperation(0, 9, (Wait(1, 3), Wait(5, 8, part=True)))),
            (1, TimedOperation(0, 9, (Wait(1, 4), Wait(6, 8, part=True)))),
            (2, TimedOperation(2, 9)),
        )
        assert means(*came) == {
            **{(0, 1, 3): "worker:2", (0, 5, 8): "worker:2"},
            **{(1, 1, 4): "worker:2", (1, 6, 8): "worker:2"},
        }

    def test_groups_do_not_wait_for_each_other(self) -> None:
        came = (
            (0, TimedOperation(0, 4, (Wait(1, 3),), 1)),
            (1, TimedOperation(2, 4, (), 1)),
            (2, TimedOperation(2.5, 4, (), 3)),
        )
        assert means(*came) == {(0, 1, 3): "worker:1"}

    def test_a_mean_that_was_started_has_come_then(self) -> None:
        came = (
            (0, TimedOperation(6, 9, (Wait(6, 8),), started=Wait(1, 2))),
            (1, TimedOperation(7, 9, started=Wait(6.5, 6.9))),
            (2, TimedOperation(7.5, 9, started=Wait(1, 2))),
        )
        assert means(*came) == {(0, 6, 8): "worker:1"}

    def test_a_mean_that_was_broken_off_does_not_shift_the_others(self) -> None:
        back = LogRecord(RecordKind.NOTE, ({"return": 1, "t": 1},))
        records = [LogRecord(MEAN, (number,)) for number in (1, 2)] + [back, LogRecord(MEAN, (3,))]
        first = [TimedOperation(1, 2), TimedOperation(5, 9, (Wait(6, 8),), returns=1)]
        second = [TimedOperation(1, 2), TimedOperation(7, 9, returns=1)]
        lives = [life(0, records, meetings=first, returns=1), life(1, records, meetings=second, returns=1)]
        assert ended(launch(lives, {})) == {(0, 6, 8): "worker:1"}
