"""What survival costs is measured on the same tasks both ways, and a restart from the kill to its first step."""

from argparse import Namespace
from itertools import pairwise

import numpy as np
import pytest
import restart
import servers

from distca.train.settings import Settings

pytestmark = pytest.mark.multiprocess


def test_both_ways_have_the_same_tasks() -> None:
    plan, wide = servers.plans_of(2, 1, 256)
    assert plan.tasks is wide.tasks and (plan.tasks.server == 2).any()
    assert (plan.layout.num_ranks, wide.layout.num_ranks) == (2, 3) and plan.num_servers == wide.num_servers == 3
    np.testing.assert_array_equal(wide.layout.tokens_per_rank(), [256, 256, 0])


@pytest.mark.slow
def test_a_case_is_measured_both_ways_and_its_server_is_killed() -> None:
    case = servers.run_case(Namespace(trainers=2, servers=2, tokens=128, rounds=1, calls=1))
    assert case.ratio == case.ratio_of_least == case.links_seconds / case.all_to_all_seconds > 0
    assert case.cpu_ratio > 0 and case.crash_seconds is not None


@pytest.mark.slow
def test_a_restart_passes_every_point_in_order() -> None:
    noted = restart.one_round(Settings().with_values({
        "run.device": "cpu", "run.ranks": 2, "run.threads": 1, "run.steps": 2 * restart.KILLED_AFTER, "run.restarts": 1,
        "run.timeout_seconds": 60, "data.max_document": 200, "batch.tokens_per_rank": 128}), "memory")
    at = [noted["killed"], *(noted["passed"][point] for point in restart.POINTS)]
    assert all(one <= other for one, other in pairwise(at[1:])) and at[1] > at[0] - 0.02  # a process starts on a tick
    assert noted["state_bytes"] > 12 * noted["parameters"] > 0 < noted["cpu_seconds"]  # float32, and two of AdamW's
