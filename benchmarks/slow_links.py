"""Do two hops pay on real slow links? Four gloo ranks in two network namespaces, with tc between them.

Each namespace is a node: its two ranks reach each other over its loopback interface, and the other node over a veth
pair whose rate tc limits both ways. One attention call, forward and backward, runs by the same plan in one hop and in
two; what the link carries is counted from the plan, so the measured ratio can be held against the bytes'. Rows are
short and the link is very slow, so that the link and not the CPU is measured.

Then the same step, layers of projections and attention, forward and backward, runs by a flat plan in one hop and by a
plan by levels in two, of documents that fit a node: over a quick link and, in turn, over one slowed until a fifth of
the flat plan's step is exposed. Exposed is what the slow link adds, over the slow step.

Needs Linux, root and iproute2; everything it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from outputs import RESULTS, host_facts, write_json

from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import C10dTransport, over_nodes
from distca.spec import ModelShape
from distca.workload.packing import pack
from distca.workload.topology import Topology

RANKS, NODES = 4, (0, 0, 1, 1)
MODEL = ModelShape("small", 1, 512, 8, 2, 64, 1024, 256)
QUICK = 10 * 10**9                                              # bits a second
ADDRESS = "10.199.{}.1"


TOPOLOGY = Topology.of_hosts([str(node) for node in NODES])
LAYERS = 4


def plan_of(tokens: int) -> Plan:
    """One document over all ranks: every rank of the later node needs the earlier node's keys."""
    return balance(pack([RANKS * tokens], ranks=RANKS), MODEL, topology=TOPOLOGY)


def step_plans(tokens: int) -> dict[str, Plan]:
    """Two documents over two ranks each: of both nodes where nobody told, of one where the levels are known."""
    lengths = [tokens + tokens // 2, *[tokens // 4] * 2] * 2
    return {
        "flat": balance(pack(lengths, ranks=RANKS, placement="balanced"), MODEL),
        "levels": balance(pack(lengths, ranks=RANKS, placement="balanced", topology=TOPOLOGY), MODEL,
                          topology=TOPOLOGY)}


def one_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(0)}:29511", rank=options.rank, world_size=RANKS)
    outer = C10dTransport()
    one, two = CoreAttention(transport=outer), CoreAttention(transport=over_nodes(outer, NODES))
    if options.steps:
        plans = step_plans(options.step_tokens)
        found = _exposed({"flat": _step(one, plans["flat"], options.rank),
                          "levels": _step(two, plans["levels"], options.rank)}, crossing_bytes(plans), options)
    else:
        plan = plan_of(options.tokens)
        runs = {"one hop": _call(one, plan, options.tokens), "two hops": _call(two, plan, options.tokens)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for attempt in range(options.repeats + 1):
            for name, run_once in runs.items():
                taken = _seconds(run_once)
                if attempt:                                      # the first builds tables and connections
                    seconds[name].append(taken)
        found = {name: median(taken) for name, taken in seconds.items()}
    if options.rank == 0:
        Path(options.output).write_text(json.dumps(found))
    dist.destroy_process_group()


def _seconds(run_once: Callable[[], None]) -> float:
    dist.barrier()
    begin = perf_counter()
    run_once()
    dist.barrier()
    return perf_counter() - begin


def _exposed(
    runs: dict[str, Callable[[], None]], crossing: dict[str, float], options: argparse.Namespace
) -> dict[str, object]:
    """Steps over the quick and the slow link in turn, so that whatever else the machine does disturbs both alike."""
    for run_once in runs.values():
        run_once()                                               # builds tables and connections
    rate = _rate_that_exposes_a_fifth(runs["flat"], crossing["flat"], options.rank)
    seconds: dict[str, dict[str, list[float]]] = {name: {"quick": [], "slow": []} for name in runs}
    for _ in range(options.repeats):
        for link, limit in (("quick", QUICK), ("slow", rate)):
            _limit(options.rank, limit)
            for name, run_once in runs.items():
                seconds[name][link].append(_seconds(run_once))
    exposed = {name: [1 - quick / slow for quick, slow in zip(found["quick"], found["slow"], strict=True)]
               for name, found in seconds.items()}
    return {"tokens_per_rank": options.step_tokens, "layers": LAYERS, "rate_bits_per_second": rate,
            "seconds": {name: {link: median(taken) for link, taken in found.items()}
                        for name, found in seconds.items()},
            "bytes_of_a_step_about": crossing,
            "exposed_share": {name: median(found) for name, found in exposed.items()}, "exposed_shares": exposed}


def _rate_that_exposes_a_fifth(flat: Callable[[], None], crossing: float, rank: int) -> int:
    """In bits a second; begins where a quarter of the quick step would be, if computing hid none of it."""
    _limit(rank, QUICK)
    quick = torch.tensor(median([_seconds(flat) for _ in range(3)]))
    dist.broadcast(quick, 0)
    rate = int(8 * crossing / (0.25 * float(quick)))
    while True:
        _limit(rank, rate)
        slow = torch.tensor(median([_seconds(flat) for _ in range(3)]))
        dist.broadcast(slow, 0)
        if 1 - float(quick) / float(slow) >= 0.2:
            return rate
        rate = rate * 3 // 4


def _limit(rank: int, rate: int) -> None:
    if rank in (0, 2):                                           # the first of each node, which is root there
        subprocess.run(["tc", *f"qdisc replace dev dca{NODES[rank]} root tbf rate {rate}bit burst 256kb latency "
                        "200ms".split()], check=True)


def _call(attend: CoreAttention, plan: Plan, tokens: int) -> Callable[[], None]:
    """One attention call, forward and backward."""
    shape = tokens, MODEL.num_heads, MODEL.head_dim
    q, dout = torch.randn(shape, requires_grad=True), torch.randn(shape)
    k, v = (torch.randn(tokens, MODEL.num_kv_heads, MODEL.head_dim, requires_grad=True) for _ in range(2))
    return lambda: attend(q, k, v, plan).backward(dout)


def _step(attend: CoreAttention, plan: Plan, rank: int) -> Callable[[], None]:
    """Layers of projections, attention and a feed-forward, forward and backward."""
    tokens, hidden = int(plan.layout.tokens_per_rank()[rank]), MODEL.hidden
    sizes = (hidden, MODEL.num_heads * MODEL.head_dim), *(((hidden, MODEL.num_kv_heads * MODEL.head_dim),) * 2), (
        hidden, MODEL.ffn), (MODEL.ffn, hidden)
    layers = [[torch.randn(size, requires_grad=True) for size in sizes] for _ in range(LAYERS)]
    inputs = torch.randn(tokens, hidden)

    def run() -> None:
        x = inputs
        for wq, wk, wv, up, down in layers:
            q, k, v = ((x @ weight).view(tokens, -1, MODEL.head_dim) for weight in (wq, wk, wv))
            x = torch.nn.functional.layer_norm(attend(q, k, v, plan).flatten(1) + x, (hidden,))
            x = torch.nn.functional.layer_norm((x @ up).relu() @ down + x, (hidden,))
        x.sum().backward()

    return run


def between_nodes(plan: Plan) -> dict[str, int]:
    """Forward bytes over the link from the first node, in float32: as each rank fetches, and once per node."""
    matrix = 2 * plan.traffic().matrix_bytes(MODEL)
    by_node = plan.traffic_between_nodes()
    assert by_node is not None
    return {"one hop": int(matrix[:2, 2:].sum()), "two hops": int(2 * by_node.sent_bytes(MODEL)[0])}


def commands(rate: str | None) -> list[str]:
    made = ["link add dca0 netns distca0 type veth peer name dca1 netns distca1"]
    for node in (0, 1):
        made += [f"-n distca{node} addr add {ADDRESS.format(node)}/16 dev dca{node}",
                 f"-n distca{node} link set dca{node} up", f"-n distca{node} link set lo up"]
    limits = [] if rate is None else [
        f"-n distca{node} qdisc add dev dca{node} root tbf rate {rate} burst 256kb latency 200ms" for node in (0, 1)]
    return [*(f"ip netns add distca{node}" for node in (0, 1)), *(f"ip {one}" for one in made),
            *(f"tc {one}" for one in limits)]


def timed(options: argparse.Namespace, rate: str | None, *more: str) -> dict[str, Any]:
    """What four ranks find over a link of that rate."""
    try:
        for command in commands(rate):
            subprocess.run(command.split(), check=True)
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "seconds.json"
            ranks = [subprocess.Popen(
                ["ip", "netns", "exec", f"distca{node}", sys.executable, __file__, "--rank", str(rank), "--tokens",
                 str(options.tokens), "--step-tokens", str(options.step_tokens), "--repeats", str(options.repeats),
                 "--output", str(answer), *more],
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"dca{node}"}) for rank, node in enumerate(NODES)]
            try:
                codes = [rank.wait(timeout=300) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise RuntimeError(f"ranks ended with {codes}")
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
    finally:
        for node in (0, 1):
            subprocess.run(["ip", "netns", "del", f"distca{node}"], check=False)


def crossing_bytes(plans: dict[str, Plan]) -> dict[str, float]:
    """What the busier way of the link carries in forward, and both in turn in backward, of all layers, in float32."""
    found = {}
    for name, plan in plans.items():
        forward = 2 * plan.traffic().matrix_bytes(MODEL)
        there, back = forward[:2, 2:].sum(), forward[2:, :2].sum()
        found[name] = LAYERS * float(max(there, back) + 2 * (there + back))
    return found


def run(options: argparse.Namespace) -> None:
    host = host_facts()
    seconds, found = timed(options, options.rate), between_nodes(plan_of(options.tokens))
    content = {
        "host": host, "rate": options.rate, "tokens_per_rank": options.tokens, "repeats": options.repeats,
        "seconds": seconds, "forward_bytes_from_node_0": found, "speedup": seconds["one hop"] / seconds["two hops"],
        "bytes_ratio": found["one hop"] / found["two hops"], "step": timed(options, None, "--steps")}
    print(json.dumps(content, indent=1))
    write_json(options.output, content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time one and two hops between namespaces over a link slowed by tc.")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--step-tokens", type=int, default=1024, help="of each rank, in the step")
    parser.add_argument("--steps", action="store_true", help="what this rank runs; see --rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "slow_links.json")
    parser.add_argument("--rank", type=int, help="that this process is; the benchmark starts its ranks by itself")
    chosen = parser.parse_args()
    (run if chosen.rank is None else one_rank)(chosen)
