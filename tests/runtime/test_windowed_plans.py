"""A plan of a window gives what attention in one piece would have given, wherever its queries and keys lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.balance import balance
from distca.planning.windows import windowed
from distca.spec import ModelShape
from tests.support.attention import attend_on_fake_ranks, dense_on_one, random_qkv
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout, random_speeds, scattered_plan

MODEL = ModelShape("small", 1, 32, 4, 2, 8, 64, 64)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**5), st.sampled_from(LAYOUT_KINDS), st.integers(1, 4), st.integers(20, 200),
       st.sampled_from([1, 5, 40, 150]), st.integers(0, 2), st.booleans())
def test_outputs_and_gradients_of_a_windowed_plan(
    seed: int, kind: LayoutKind, ranks: int, tokens: int, window: int, dedicated: int, scattered: bool
) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    causal = (scattered_plan(seed, layout, ranks + dedicated, MODEL) if scattered
              else balance(layout, MODEL, tolerance=0.05, speed=random_speeds(seed, ranks, dedicated)))
    plan = windowed(causal, window)
    tensors = random_qkv(seed, layout.num_tokens, 4, 2)
    for got, want in zip(attend_on_fake_ranks(*tensors, plan, kernel="sdpa"),
                         dense_on_one(*tensors, layout.lengths, None, window), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_another_window_than_the_plans_is_refused() -> None:
    plan = windowed(balance(random_layout(0, LAYOUT_KINDS[0], 1, 100), MODEL), 1)
    assert plan.window == 1
    tensors = random_qkv(0, plan.layout.num_tokens, 4, 2)
    with pytest.raises(ValueError, match="window is 5 but the plan is for a window of 1"):
        attend_on_fake_ranks(*tensors, plan, window=5)
