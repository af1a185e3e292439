"""The contract suite of the schemes with tasks of JAX, Keras and TensorFlow in place of the quadratic: equal seeds give
equal bits, a saved run goes on with the same bits, and any worker may die at any time."""

from __future__ import annotations

import importlib.util

import pytest
import simulated_runs
from beds.scheme_cases import over_schemes
from framework_networks import TASKS
from test_every_scheme_repeats import (  # noqa: F401
    test_a_common_batch_is_shared_out,
    test_a_run_in_pieces_is_the_run,
    test_a_snapshot_is_a_copy,
    test_another_seed_gives_other_bits,
    test_equal_seeds_give_equal_bits,
    test_every_change_of_the_centre_is_seen_once,
    test_noise_comes_from_the_batches_alone,
    test_restored_with_a_dead_worker,
    test_saved_and_restored_goes_on_with_the_same_bits,
    test_saving_twice_or_on_the_way_changes_nothing,
)
from test_every_scheme_under_faults import (  # noqa: F401
    test_all_but_one_die,
    test_everybody_dies_and_comes_back,
    test_killed_at_any_await,
    test_killed_at_any_await_and_back,
    test_replicas_agree_after_a_return,
    test_the_same_faults_give_the_same_bits,
)

pytest_generate_tests = over_schemes
# TensorFlow's own, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(params=sorted(TASKS), autouse=True)
def _of_a_framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (request.param, "tensorflow" if request.param == "keras" else request.param):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    monkeypatch.setattr(simulated_runs, "made_task", TASKS[request.param])
