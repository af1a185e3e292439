"""The slice of the system tests that `make test` runs: a few of each world. The others are long (`make test-long`), but
for most cases of tests that have very many (`make matrix`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from beds.samples_of_cases import of_a_kind, one_in

QUICK = frozenset(
    {
        "test_quick_slice.py::test_every_name_of_the_slice_is_a_test",
        # processes of one machine
        "test_train.py::test_json_is_one_object_with_all_that_simulate_gives_and_more",
        "test_train.py::test_the_commands_on_runs",
        "test_train.py::test_the_evaluator_follows_and_keeps_the_best",
        "test_train_resume.py::test_what_is_known_of_the_run_goes_on_too",
        "test_attach_alone.py::TestByItself::test_it_is_a_run_of_one_worker",
        "test_attach.py::TestTheLoop::test_every_scheme_lives_in_a_script[async]",
        "test_examples.py::test_one_worker_has_the_bits_of_the_plain_script[gan]",
        "test_script_display.py::test_the_prints_of_the_chief_reach_people_and_others_by_option[chief-names0]",
        "test_cli.py::test_a_mistake_in_a_real_process_shows_no_traceback",
        # deaths, signals, damaged files
        "test_kills.py::test_every_role_is_killed_again_and_again[async]",
        "test_kills.py::test_every_role_is_killed_again_and_again[averaging]",
        "test_kills.py::test_either_of_two_servers_is_killed[sync]",
        "test_kills_servers.py::test_all_go_back_to_the_last_checkpoint[FrailAsync-1-victims0]",
        "test_signals.py::test_sigterm_to_the_group_restarts_nobody_and_loses_nothing",
        "test_damaged_files.py::TestPlan::test_options_of_resume_change_it",
        # records: replay, samples, verify; exact runs
        "test_replay.py::test_every_scheme_is_repeated_bit_for_bit[downpour]",
        "test_replay.py::test_every_scheme_is_repeated_bit_for_bit[averaging]",
        "test_samples.py::test_the_commands",
        "test_old_runs.py::test_it_is_verified_and_replayed[sync]",
        "test_old_runs.py::test_it_is_resumed[averaging]",
        "test_exact.py::test_one_digest_in_any_number_of_processes[sync]",
        "test_exact.py::test_a_killed_process_changes_no_bit[averaging]",
        # lessons
        "test_tutorial.py::test_a_lesson_runs[03-local-and-global-variables]",
        # several nodes over loopback, TF_CONFIG
        "test_nodes.py::test_every_kind_of_scheme_with_a_server_trains[async]",
        "test_nodes.py::test_a_killed_role_is_brought_back[worker:1-async]",
        "test_nodes.py::test_schemes_without_a_server_have_the_bits_of_the_simulator[allreduce]",
        "test_tf_config.py::test_five_shells_with_an_evaluator",
        "test_tf_config.py::test_a_misspelt_cluster_does_not_train_alone",
    }
)


# cases of every scheme: those of a scheme of each kind are long, the others are of the matrix
EVERY_SCHEME = frozenset(
    {
        "test_attach.py::TestTheLoop::test_every_scheme_lives_in_a_script",
        "test_replay.py::test_every_scheme_is_repeated_bit_for_bit",
    }
)
# cases of every combination of several parameters: one in so many is long
THINNED = {
    "test_distributed_means.py::test_a_death_at_any_point_of_a_mean_counts_for_all_or_for_nobody": 3,
    "test_distributed_means.py::test_a_killed_worker_joins_again_and_the_run_can_be_repeated": 3,
    "test_distributed_means.py::test_a_run_has_the_bits_of_the_simulator_and_of_shared_memory": 2,
    "test_distributed_means.py::test_a_worker_that_has_missed_a_mean_gets_it_from_the_others": 2,
    "test_signals.py::test_a_signal_at_any_moment_ends_the_run": 2,
    "test_stops.py::test_without_a_server_all_end_with_the_same_step": 3,
}


HERE = Path(__file__).parent
ABSENT = pytest.StashKey[frozenset[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item.nodeid.removeprefix("tests/system/"): item for item in items}
    for name in names.keys() - QUICK:
        if names[name].path.is_relative_to(HERE):
            names[name].add_marker(pytest.mark.long if _sampled(name, names[name]) else pytest.mark.matrix)
    config.stash[ABSENT] = QUICK - names.keys()


def _sampled(name: str, item: pytest.Item) -> bool:
    test = name.partition("[")[0]
    if test in EVERY_SCHEME:
        return of_a_kind(item)
    return test not in THINNED or one_in(item, THINNED[test])


@pytest.fixture
def absent(pytestconfig: pytest.Config) -> frozenset[str]:
    """Names of the slice that are no tests, if all system tests were collected."""
    return pytestconfig.stash[ABSENT]
