"""A plan that travelled is the same plan, and bytes that are no plan are refused in one line, whatever they are."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.choose import plan_step
from distca.planning.plan import Plan
from distca.planning.plan_bytes import MAGIC, plan_from_bytes, plan_to_bytes
from distca.planning.step import same_columns
from distca.planning.tasks import TaskTable
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout, random_speeds

TINY = MODELS["tiny"]


def assert_same(got: Plan, plan: Plan) -> None:
    assert same_columns(got.layout, plan.layout)
    for name in TaskTable.__slots__:
        np.testing.assert_array_equal(getattr(got.tasks, name), getattr(plan.tasks, name))
    np.testing.assert_array_equal(got.speed, plan.speed)
    for name in ("tolerance", "model", "tp", "limit", "backward", "num_servers"):
        assert getattr(got, name) == getattr(plan, name)
    assert got.cost is None
    assert not any(column.flags.writeable for column in (got.speed, got.tasks.server, got.layout.rank))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(LAYOUT_KINDS), ranks=st.integers(1, 6),
       dedicated=st.integers(0, 3))
def test_a_plan_comes_back_as_it_went(seed: int, kind: LayoutKind, ranks: int, dedicated: int) -> None:
    layout = random_layout(seed, kind, ranks, 700)
    plan = balance(layout, TINY, speed=random_speeds(seed, ranks, dedicated), tolerance=0.05)
    got = plan_from_bytes(plan_to_bytes(plan))
    assert_same(got, plan)
    got.validate()


def test_slices_that_are_keys_only_come_along() -> None:
    step = plan_step([np.array([2048])], TINY, num_data=2, layers=[TINY.num_layers], ping_pong=True)
    plans = [plan for rows in step.plans_of(0) for row in rows for plan in row]
    assert any(len(plan.layout.key_only) for plan in plans)      # not vacuous: pong reads ping's keys
    for plan in plans:
        assert_same(plan_from_bytes(plan_to_bytes(plan)), plan)


@pytest.fixture(scope="module")
def content() -> bytes:
    return plan_to_bytes(balance(random_layout(3, LAYOUT_KINDS[0], 3, 500), TINY, tolerance=0.05))


def test_other_bytes_are_refused(content: bytes) -> None:
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(content[len(MAGIC):begin], "little")
    header = json.loads(content[begin:end])

    def with_header(fields: dict[str, Any] | list[Any]) -> bytes:
        text = json.dumps(fields).encode()
        return MAGIC + len(text).to_bytes(8, "little") + text + content[end:]

    bad = [b"", MAGIC, content[:-1], content + b"x", b"\x80\x04" + content, with_header([]), with_header({}),
           with_header(header | {"columns": {}}), with_header(header | {"model": {"name": "x"}}),
           with_header(header | {"columns": header["columns"] | {"speed": 10**18}}),
           with_header(header | {"columns": header["columns"] | {"speed": -1}}),
           with_header(header | {"num_ranks": "many"}), MAGIC + (2**63).to_bytes(8, "little") + b"{}"]
    for one in bad:
        with pytest.raises(ValueError, match="run the same distca"):
            plan_from_bytes(one)


def test_random_bytes_are_refused_or_are_a_plan_that_can_be_judged(content: bytes) -> None:
    for case in range(300):
        chance = random.Random(case)
        spoilt = bytearray(content)
        for _ in range(chance.randrange(1, 4)):
            spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        try:
            plan_from_bytes(spoilt)
        except ValueError as error:
            assert "\n" not in str(error)
