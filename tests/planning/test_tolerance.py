"""Tolerance auto: the quickest predicted step of a few, the same for everyone who asks; bytes and links decide it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import distca
from distca.cli import main
from distca.cost.attention_time import shipped_table
from distca.models import MODELS
from distca.planning.choose import AUTO, TOLERANCES, asked_tolerance, plan_step
from distca.planning.step import StepPlan
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.setting import setting
from distca.simulate.strategies import STRATEGIES, PoolChoice
from distca.simulate.sweep import Question, compare
from distca.spec import ClusterShape, cluster_named
from distca.train.batches import attention_time, step_plan
from distca.train.settings import Settings, load_settings
from distca.train.settings.checks import check_settings
from distca.workload.documents import sample_lengths
from distca.workload.sequences import Source

LLAMA, TABLE, DGX = MODELS["llama3-8b"], shipped_table("h200"), cluster_named("dgx-h200")
LENGTHS = sample_lengths("prolong", 8 * 16_384, seed=0)


def links(times: float) -> ClusterShape:
    """Links of another bandwidth, without latencies."""
    return replace(DGX, intra_node_bandwidth=times * DGX.intra_node_bandwidth, intra_node_latency_seconds=0.0,
                   inter_node_bandwidth=times * DGX.inter_node_bandwidth, inter_node_latency_seconds=0.0)


def planned(cluster: ClusterShape, **options: object) -> StepPlan:
    return distca.plan_step([LENGTHS], 8, tp=8, tolerance="auto", cost=TABLE, cluster=cluster, placement="given",
                            **options)  # type: ignore[arg-type]


def test_free_links_take_the_tightest_and_slow_links_a_looser_one() -> None:
    free, slow = planned(links(1e9)), planned(links(0.02))
    assert free.plans[0].tolerance == TOLERANCES[0] < slow.plans[0].tolerance
    for step in (free, slow):
        step.validate()
        assert [one for one, _ in step.tried] == list(TOLERANCES)
        assert min(seconds for _, seconds in step.tried) == dict(step.tried)[step.plans[0].tolerance]


def test_the_seconds_are_those_of_each_step_executed() -> None:
    step, costs = planned(DGX), Costs.of(LLAMA, DGX, 8, TABLE)
    for tolerance, seconds in step.tried:
        alone = plan_step([LENGTHS], LLAMA, num_data=8, layers=(32,), tp=8, tolerance=tolerance, placement="given",
                          cost=costs.attention)
        assert execute(alone, costs).seconds == seconds          # the same plan and costs: one computation twice


def test_equal_seconds_leave_the_network_to_others() -> None:
    step = plan_step([LENGTHS], LLAMA, num_data=8, layers=(1,), tolerance=lambda _: 1.0)
    assert step.plans[0].tolerance == TOLERANCES[-1]


def test_a_run_chooses_what_the_api_does_from_lengths_alone() -> None:
    run = load_settings(None, {"model.name": "llama3-8b", "parallel.tensor": "8", "attention.tolerance": "auto",
                               "attention.cost": "h200"})
    trained = [step_plan([LENGTHS], run, LLAMA, 8, attention_time(run, LLAMA)) for _ in range(2)]
    asked = distca.plan_step([LENGTHS], 8, tp=8, tolerance="auto", cost=TABLE)
    assert trained[0].tried == trained[1].tried == asked.tried
    assert trained[0].plans[0].tolerance == asked.plans[0].tolerance


def test_a_strategy_chooses_among_the_same_and_a_number_is_that_number() -> None:
    where = setting(LLAMA, DGX, gpus=32, context=32_768, sequences=4)
    choices = [STRATEGIES["distca"].choices(where, asked) for asked in (AUTO, 0.1)]
    assert [[one.tolerance for one in found if isinstance(one, PoolChoice) and one.ping_pong]
            for found in choices] == [list(TOLERANCES), [0.1]]
    outcome = compare(Question((where,), ("distca",), Source("prolong"), TABLE, AUTO, 1)).outcome("distca")
    assert isinstance(outcome.choice, PoolChoice) and f"tolerance {outcome.choice.tolerance:g}" in outcome.describe()


@pytest.mark.parametrize(("value", "said"), [
    ("tight", "tolerance is 'tight'; give a number from 0 to 1, such as 0.05, or auto"),
    (2, r"tolerance is 2\.?0?; give a number from 0 to 1"), ("nan", "tolerance is nan; give a number")])
def test_what_is_no_tolerance_is_refused(value: float | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked_tolerance(value)


def test_auto_needs_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="tolerance is 'auto' but cost is None; give the latency table"):
        distca.plan_step([[512, 512]], 2, tolerance="auto")
    with pytest.raises(ValueError, match=r"attention\.tolerance is 'auto' but attention.cost is empty; name"):
        check_settings(Settings().with_values({"attention.tolerance": "auto"}))
    with pytest.raises(ValueError, match=r"attention\.tolerance is 'tight'; give a number or auto"):
        load_settings(None, {"attention.tolerance": "tight"})
    with pytest.raises(SystemExit) as ended:
        main(["plan", "prolong", "--tolerance", "auto"])
    assert ended.value.code == 2 and "tolerance is 'auto' but cost is not given" in capsys.readouterr().err


def test_a_toml_keeps_auto(tmp_path: Path) -> None:
    chosen = Settings().with_values({"attention.tolerance": "auto", "attention.cost": "h200"})
    path = tmp_path / "run.toml"
    path.write_text(chosen.to_toml())
    assert load_settings(path, {}) == chosen


def test_plan_says_what_it_chose_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "prolong", "--ranks", "4", "--tokens-per-rank", "8k", "--tolerance", "auto", "--cost", "h200",
              "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    seconds = found["step_seconds_by_tolerance"]
    assert list(seconds) == [f"{one:g}" for one in TOLERANCES]
    assert found["tolerance"] == max(float(one) for one in seconds if seconds[one] == min(seconds.values()))
    assert found["work_max_over_mean"] <= 1 + found["tolerance"] + 1e-9 or found["limit"]
    assert np.isfinite(found["plan_seconds"])
