"""Plans are the same bits on any CPU, numpy and Python: ranks plan for themselves and then only compare digests.

Run as a program, this file prints one digest per plan. The tests run it with numpy's SIMD loops switched off, with
other hash seeds and thread counts, with the compensated `sum` of newer Pythons, and with every function forbidden that
processors or libraries round differently.
"""

import builtins
import hashlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest

from distca.cost.attention_time import AttentionTime, find_table, shipped_names
from distca.cost.latency_table import analytic_table
from distca.cost.mixed_pool import MixedPool, ServerKind
from distca.cost.network import find_cluster
from distca.models import MODELS
from distca.planning.balance import balance, learnt_speeds, rounded_speeds
from distca.planning.choose import plan_step, work_of_documents
from distca.planning.plan import Plan
from distca.planning.plan_bytes import plan_to_bytes
from distca.planning.step import StepPlan
from distca.planning.windows import windowed, with_windows
from distca.simulate.execute import step_seconds
from distca.spec import ModelShape
from distca.workload.packing import NO_CUTS, pack
from distca.workload.topology import Topology

TABLES = {name: find_table(name) for name in shipped_names()}
MODEL_NAMES = ("llama3-8b", "llama-34b", "qwen2.5-7b", "llama2-7b", "gpt-oss-20b", "deepseek-v2-lite")
ROUNDED_ANYHOW = (  # in numpy, in math or in both
    "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "pow", "power", "float_power", "interp", "dot", "vdot",
    "inner", "matmul", "einsum", "tanh", "sin", "cos", "hypot", "cbrt")


def lengths_of(draw: random.Random, tokens: int) -> np.ndarray:
    """Documents of a batch: mostly short, some long, the last cut to fit. Whole numbers alone make them."""
    longest, lengths, left = draw.randrange(8, 18), [], tokens
    while left:
        length = min(left, draw.randrange(1, 2 << draw.randrange(6, longest)))
        lengths.append(length)
        left -= length
    return np.array(lengths)


def cost_of(draw: random.Random, model: ModelShape, tp: int, servers: int) -> AttentionTime:
    """A shipped or an analytic table, or a pool of both kinds of GPU."""
    names = sorted(TABLES) if model.head_dim == model.value_dim == 128 else ["h200"]  # the other has no other heads
    table, other = (TABLES[draw.choice(names)] for _ in range(2))
    kind = draw.randrange(4)
    if kind == 0 and model.head_dim == model.value_dim:
        rate = 1e12 * draw.randrange(100, 900)
        return AttentionTime.of(analytic_table(model, rate, tp=tp, max_kv_len=draw.randrange(4096, 200_000)), model, tp)
    if kind == 1 and servers > 1:
        first = draw.randrange(1, servers)
        return MixedPool((ServerKind(first, table), ServerKind(servers - first, other, draw.randrange(30, 120) / 100))
                         ).time(model, tp)
    return AttentionTime.of(table, model, tp)


def speeds_of(draw: random.Random, ranks: int, dedicated: int) -> np.ndarray:
    """Learnt from a few steps' seconds, as attention.adapt does, or all alike; dedicated servers last."""
    latest = np.ones(ranks + dedicated)
    for _ in range(draw.randrange(4)):
        work, seconds = (np.array([draw.randrange(1, 1000) / 997 for _ in latest]) for _ in range(2))
        latest = learnt_speeds(latest, work, seconds)
    return rounded_speeds(latest)


def topology_of(draw: random.Random, servers: int) -> Topology | None:
    per_node = draw.choice((0, 0, 2, 3, 4))
    return Topology.regular(servers, per_node, draw.choice((0, 0, 2))) if per_node else None


def table_plan(number: int) -> Plan:
    draw = random.Random(number)
    ranks, tp = draw.choice((2, 3, 4, 6, 8, 12, 16)), draw.choice((1, 2, 4))
    model = MODELS[draw.choice(MODEL_NAMES)]
    speed = speeds_of(draw, ranks, draw.choice((0, 0, 1, 3)))
    cost, topology = cost_of(draw, model, tp, len(speed)), topology_of(draw, len(speed))
    tolerance = draw.choice((0.01, 0.05, 0.2))
    layout = pack(lengths_of(draw, ranks * draw.choice((2048, 8192, 32_768))), ranks=ranks, tolerance=tolerance,
                  placement=draw.choice(("given", "balanced")), speed=speed * cost.speeds(len(speed)),
                  document_work=work_of_documents(cost), cuts=cost.cuts() if draw.randrange(2) else NO_CUTS,
                  topology=None if topology is None else topology.first(ranks))
    plan = balance(layout, model, tolerance=tolerance, speed=speed, tp=tp, cost=cost, backward=bool(draw.randrange(2)),
                   topology=topology)
    return windowed(plan, draw.randrange(64, 4096)) if draw.randrange(4) == 0 else plan


def table_step(number: int) -> StepPlan:
    draw = random.Random(-1 - number)
    num_data, layers, tp = draw.choice((2, 3, 4)), draw.choice(((2,), (3,), (1, 2), (2, 1, 1))), draw.choice((1, 2))
    model = MODELS[draw.choice(MODEL_NAMES[:4])]
    speed = speeds_of(draw, len(layers) * num_data, draw.choice((0, 0, 1)))
    cost, topology = cost_of(draw, model, tp, len(speed)), topology_of(draw, len(speed))
    tokens = num_data * draw.choice((2048, 8192))
    tolerance: Any = draw.choice((0.02, 0.05, 0.05, "auto"))
    if tolerance == "auto":
        tolerance = step_seconds(model, find_cluster("dgx-h200"), tp, TABLES["h200"])
    step = plan_step([lengths_of(draw, tokens) for _ in range(draw.randrange(1, 4))], model, num_data=num_data, tp=tp,
                     layers=layers, ping_pong=bool(draw.randrange(2)), placement=draw.choice(("given", "balanced")),
                     tolerance=tolerance, speed=speed, cost=cost, topology=topology)
    window = draw.choice((None, None, 512, 1500))
    return with_windows(step, [window] * sum(layers))


def digests(plans: Iterable[int], steps: Iterable[int]) -> list[str]:
    """Of everything that ranks would compare, and of the seconds that speeds are learnt from."""
    found = [plan_to_bytes(table_plan(number)) for number in plans]
    for number in steps:
        step = table_step(number)
        shape = [[[[at for at in depths if at >= 0] for depths in nanos] for nanos in ticks]
                 for ticks in step.calls.tolist()]
        found.append(b"".join((repr((step.placement, step.tried, shape)).encode(), step.server_work().tobytes(),
                               *map(plan_to_bytes, step.plans))))
    return [hashlib.blake2b(content, digest_size=8).hexdigest() for content in found]


def compensated(values: Iterable[Any], /, start: Any = 0) -> Any:
    """The `sum` of Python 3.12 and later, more or less: of floats, without rounding in between."""
    items = [start, *values]
    return math.fsum(items) if any(isinstance(item, float) for item in items) else reduce(add, items)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a plan calls a function that is rounded differently on other machines")


def on_another_machine() -> None:
    """Another Python's `sum`, and nothing of what libraries are free to round as they like."""
    builtins.sum = compensated
    for module in (np, math):
        for name in ROUNDED_ANYHOW:
            if hasattr(module, name):
                setattr(module, name, refuse)


def simd_features() -> list[str]:
    """What numpy was built with and this CPU has beyond numpy's baseline, least first; none on some CPUs."""
    core: Any = np._core._multiarray_umath  # type: ignore[attr-defined]
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]


def digests_elsewhere(num_plans: int, num_steps: int, disabled: list[str], seed: int, threads: int) -> list[str]:
    variables = {"NPY_DISABLE_CPU_FEATURES": " ".join(disabled), "PYTHONHASHSEED": str(seed),
                 "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, __file__, str(num_plans), str(num_steps)], capture_output=True, text=True,
                          env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_plans_have_the_same_bits_without_simd_and_with_other_libraries() -> None:
    assert digests_elsewhere(6, 4, simd_features(), seed=1, threads=2) == digests(range(6), range(4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_plans_have_the_same_bits_with_any_simd() -> None:
    here, features = digests(range(300), range(30)), simd_features()
    assert len(set(here)) > 300                                  # not vacuous
    for at in range(len(features) + 1):
        assert digests_elsewhere(300, 30, features[at:], seed=at, threads=1 + at % 2) == here


if __name__ == "__main__":
    on_another_machine()
    print("\n".join(digests(range(int(sys.argv[1])), range(int(sys.argv[2])))))
