"""Bands: the same attention by the same ranks in fewer bytes, never over a cap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.cost.work import pairs_of_shard
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import Plan, server_work
from distca.planning.prefix_split import share_prefixes
from distca.planning.shard_cut import Prices
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.planning.traffic import traffic
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import LAYOUT_KINDS, LayoutKind, covers_exactly_once, random_layout

LLAMA = MODELS["llama3-8b"]
TIME = AttentionTime.of(analytic_table(LLAMA, 550e12, max_kv_len=131_072), LLAMA)


def prices_in(cost: AttentionTime | None) -> Prices:
    measure = pairs_of_shard if cost is None else lambda q_len, kv_len: cost.shard(q_len, max(q_len, kv_len))
    return Prices(2 * LLAMA.q_token_bytes(), LLAMA.kv_token_bytes(), measure)


def loads(tasks: TaskTable, cost: AttentionTime | None, num_ranks: int) -> np.ndarray:
    return server_work(tasks, num_ranks, cost)


def bytes_moved(layout: Layout, tasks: TaskTable) -> float:
    return traffic(layout, tasks, layout.num_ranks).sent_bytes(LLAMA).sum()


def slices_of_one_document(edges: list[int], ranks: list[int]) -> Layout:
    """A document cut at `edges`, its slices on `ranks` in order."""
    start, stop = np.array([0, *edges[:-1]]), np.array(edges)
    return layout_from_slices(stop[-1:], np.zeros_like(stop), start, stop, np.array(ranks), max(ranks) + 1)


def run_of_slices(seed: int, ranks: int) -> Layout:
    """A long prefix on rank 0, then short slices on the others: where bands pay. Sometimes a rank owns two slices."""
    rng = np.random.default_rng(seed)
    widths = [int(rng.integers(2000, 40_000)), *rng.integers(1, 700, size=int(rng.integers(1, 14))).tolist()]
    owners = np.arange(len(widths)) % ranks if rng.random() < 0.5 else rng.integers(0, ranks, size=len(widths))
    return slices_of_one_document(np.cumsum(widths).tolist(), owners.tolist())


layouts = (
    st.builds(random_layout, st.integers(0, 2**32), st.sampled_from(LAYOUT_KINDS), st.integers(2, 8),
              st.integers(100, 6000))
    | st.builds(run_of_slices, st.integers(0, 2**32), st.integers(2, 9)))


@settings(max_examples=250, deadline=None)
@given(layouts, st.floats(0, 0.5), st.sampled_from([None, TIME]))
def test_bytes_never_rise_and_loads_stay_within_the_cap(layout: Layout, slack: float,
                                                        cost: AttentionTime | None) -> None:
    home = tasks_at_home(layout)
    load = loads(home, cost, layout.num_ranks)
    cap = (1 + slack) * np.maximum(load, load.mean())
    tasks = share_prefixes(layout, home, load, cap, prices_in(cost))
    Plan(layout, tasks, np.ones(layout.num_ranks), slack, LLAMA).validate()
    assert covers_exactly_once(layout.lengths, tasks)
    assert bytes_moved(layout, tasks) <= bytes_moved(layout, home)
    assert (loads(tasks, cost, layout.num_ranks) <= cap * (1 + 1e-9)).all()


@settings(max_examples=100, deadline=None)
@given(layouts, st.floats(0, 0.3))
def test_servers_over_their_cap_get_no_more(layout: Layout, tolerance: float) -> None:
    home = tasks_at_home(layout)
    load = loads(home, None, layout.num_ranks)
    cap = np.full(layout.num_ranks, (1 + tolerance) * load.mean())
    tasks = share_prefixes(layout, home, load, cap, prices_in(None))
    assert covers_exactly_once(layout.lengths, tasks)
    assert (loads(tasks, None, layout.num_ranks) <= np.maximum(cap, load) * (1 + 1e-9)).all()


def test_four_neighbours_share_a_prefix_by_hand() -> None:
    """8,192 tokens on rank 0, then four slices of 128 on ranks 1 to 4; a query with its output weighs four keys.

    At home the four gather 8192 + 8320 + 8448 + 8576 keys. As one band the keys before the last slice travel once
    (8,576), and each of 4 x 128 queries goes to three neighbours: 1,536 queries, 6,144 keys' worth. This is the m with
    m² · width · 4 = prefix, where theory leaves (2m - 1) / m² = 7/16; slices that are not points add a little.
    """
    layout = slices_of_one_document([8192, 8320, 8448, 8576, 8704], [0, 1, 2, 3, 4])
    home = tasks_at_home(layout)
    load = loads(home, None, 5)
    assert bytes_moved(layout, home) == 33_536 * 4096
    tasks = share_prefixes(layout, home, load, 1.1 * load, prices_in(None))
    assert covers_exactly_once(layout.lengths, tasks)
    assert bytes_moved(layout, tasks) == (8576 + 6144) * 4096
    assert bytes_moved(layout, tasks) <= 1.01 * 7 / 16 * bytes_moved(layout, home)
    assert (loads(tasks, None, 5) <= 1.1 * load).all()


@pytest.mark.parametrize("num_slices", [2, 3, 5])
def test_the_best_band_saves_what_the_formula_says(num_slices: int) -> None:
    """Slices of one tile behind m² · 4 tiles of keys leave (2m - 1) / m² of the bytes, up to the slices' own width."""
    prefix = num_slices**2 * 4 * 128
    edges = [prefix + 128 * i for i in range(num_slices + 1)]
    layout = slices_of_one_document(edges, list(range(num_slices + 1)))
    home = tasks_at_home(layout)
    load = loads(home, None, num_slices + 1)
    before = bytes_moved(layout, home)
    after = bytes_moved(layout, share_prefixes(layout, home, load, 1.5 * load, prices_in(None)))
    width = num_slices * 128
    assert after <= (2 * num_slices - 1) / num_slices**2 * before * (1 + width / prefix)
    assert after < before


def test_without_slack_nothing_changes_for_the_worse() -> None:
    layout = slices_of_one_document([8192, 8320, 8448, 8576, 8704], [0, 1, 2, 3, 4])
    home = tasks_at_home(layout)
    load = loads(home, None, 5)
    tasks = share_prefixes(layout, home, load, load, prices_in(None))
    assert (loads(tasks, None, 5) <= load).all()


def test_a_rank_that_owns_part_of_the_prefix_keeps_its_free_keys() -> None:
    """Rank 0 owns the prefix and the last slice, so it gathers 256 keys where a band would send it queries."""
    layout = slices_of_one_document([4096, 4352, 4608], [0, 1, 0])
    home = tasks_at_home(layout)
    load = loads(home, None, 2)
    tasks = share_prefixes(layout, home, load, 2 * load, prices_in(None))
    assert bytes_moved(layout, tasks) <= bytes_moved(layout, home) == (4096 + 256) * 4096


def test_room_that_a_band_frees_is_not_spent_where_that_band_is_given_up() -> None:
    """Documents on the same ranks: a band of one may not count on room that another's would have made."""
    rows = np.array([
        (0, 0, 3963, 1), (0, 3963, 4371, 0),
        (1, 0, 3822, 0), (1, 3822, 3860, 2), (1, 3860, 4053, 2), (1, 4053, 4293, 2), (1, 4293, 4746, 1),
        (2, 0, 6913, 0), (2, 6913, 7425, 1), (2, 7425, 7511, 2), (2, 7511, 7579, 0), (2, 7579, 8159, 0)])
    document, start, stop, rank = rows.T
    layout = layout_from_slices(np.array([4371, 4746, 8159]), document, start, stop, rank, 3)
    layout.validate()
    home = tasks_at_home(layout)
    load = loads(home, None, 3)
    tasks = share_prefixes(layout, home, load, 1.01 * load, prices_in(None))
    assert (loads(tasks, None, 3) <= 1.01 * load * (1 + 1e-9)).all()


def test_bands_appear_in_balanced_plans() -> None:
    """Not vacuous: one long document over ranks whose work placement levels ends in tasks that share prefixes."""
    widths = [40_000, *([700] * 12)]
    layout = slices_of_one_document(np.cumsum(widths).tolist(), list(range(13)))
    plan = balance(layout, LLAMA, tolerance=1.0)
    plan.validate()
    partial = (plan.tasks.kv_start > 0) & (plan.tasks.home != plan.tasks.server)
    assert partial.any()


@pytest.mark.parametrize("backward", [False, True])
def test_keys_of_a_long_document_reach_one_rank_of_a_node(backward: bool) -> None:
    """Every node needs nearly all keys; its eight ranks divide them, wherever in the document their slices begin."""
    lengths = np.append(131_072, np.full(512, 256))
    topology = Topology.regular(64, 8)
    layout = pack(lengths, ranks=64, placement="balanced", topology=topology)
    plan = balance(layout, LLAMA, cost=AttentionTime.of(shipped_table("h200"), LLAMA), backward=backward,
                   topology=topology)
    plan.validate()
    assert covers_exactly_once(layout.lengths, plan.tasks)
    keys = plan.traffic()
    received = np.bincount(keys.kv_server, weights=keys.kv_tokens, minlength=64)
    reach = [int(plan.tasks.kv_stop[topology.node[plan.tasks.server] == node].max()) for node in range(8)]
    assert min(reach) > 32_768                                   # not vacuous: nodes need many keys
    assert received.mean() <= 0.3 * 131_072                      # a rank of a node that does not divide them needs 0.5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(LAYOUT_KINDS), st.integers(2, 8), st.integers(500, 4000))
def test_bands_of_groups_are_exact_and_within_the_cap(seed: int, kind: LayoutKind, ranks: int, tokens: int) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    tasks, group = tasks_at_home(layout), np.arange(ranks) // 3
    load = server_work(tasks, ranks, None)
    cap = np.maximum(load, 1.1 * load.mean())
    prices = Prices(2 * LLAMA.q_token_bytes(), LLAMA.kv_token_bytes(), pairs_of_shard)
    shared = share_prefixes(layout, tasks, load, cap, prices, group)
    assert covers_exactly_once(layout.lengths, shared)
    assert (server_work(shared, ranks, None) <= cap * (1 + 1e-9)).all()
    assert (group[shared.server] == group[shared.home]).all()
