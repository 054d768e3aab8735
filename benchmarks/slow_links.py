"""Do two hops pay on real slow links? Four gloo ranks in two network namespaces, with tc between them.

Each namespace is a node: its two ranks reach each other over its loopback interface, and the other node over a veth
pair whose rate tc limits both ways. One attention call, forward and backward, runs by the same plan in one hop and in
two; what the link carries is counted from the plan, so the measured ratio can be held against the bytes'. Rows are
short and the link is very slow, so that the link and not the CPU is measured. Needs Linux, root and iproute2;
everything it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from planner import host_facts

from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import C10dTransport, over_nodes
from distca.spec import ModelShape
from distca.workload.packing import pack
from distca.workload.topology import Topology

RANKS, NODES = 4, (0, 0, 1, 1)
MODEL = ModelShape("small", 1, 512, 8, 2, 64, 1024, 256)
OUTPUT = Path(__file__).parent / "results" / "slow_links.json"
ADDRESS = "10.199.{}.1"


def plan_of(options: argparse.Namespace) -> Plan:
    """One document over all ranks: every rank of the later node needs the earlier node's keys."""
    topology = Topology.of_hosts([str(node) for node in NODES])
    return balance(pack([RANKS * options.tokens], ranks=RANKS), MODEL, topology=topology)


def one_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(0)}:29511", rank=options.rank, world_size=RANKS)
    plan, outer = plan_of(options), C10dTransport()
    seconds: dict[str, list[float]] = {"one hop": [], "two hops": []}
    carriers = {"one hop": CoreAttention(transport=outer),
                "two hops": CoreAttention(transport=over_nodes(outer, NODES))}
    shape = options.tokens, MODEL.num_heads, MODEL.head_dim
    q, dout = torch.randn(shape, requires_grad=True), torch.randn(shape)
    k, v = (torch.randn(options.tokens, MODEL.num_kv_heads, MODEL.head_dim, requires_grad=True) for _ in range(2))
    for attempt in range(options.repeats + 1):
        for name, attend in carriers.items():
            dist.barrier()
            begin = perf_counter()
            attend(q, k, v, plan).backward(dout)
            dist.barrier()
            if attempt:                                          # the first builds tables and connections
                seconds[name].append(perf_counter() - begin)
    if options.rank == 0:
        Path(options.output).write_text(json.dumps({name: median(found) for name, found in seconds.items()}))
    dist.destroy_process_group()


def between_nodes(plan: Plan) -> dict[str, int]:
    """Forward bytes over the link from the first node, in float32: as each rank fetches, and once per node."""
    matrix = 2 * plan.traffic().matrix_bytes(MODEL)
    by_node = plan.traffic_between_nodes()
    assert by_node is not None
    return {"one hop": int(matrix[:2, 2:].sum()), "two hops": int(2 * by_node.sent_bytes(MODEL)[0])}


def commands(rate: str) -> list[str]:
    made = ["link add dca0 netns distca0 type veth peer name dca1 netns distca1"]
    for node in (0, 1):
        made += [f"-n distca{node} addr add {ADDRESS.format(node)}/16 dev dca{node}",
                 f"-n distca{node} link set dca{node} up", f"-n distca{node} link set lo up"]
    limits = [f"-n distca{node} qdisc add dev dca{node} root tbf rate {rate} burst 256kb latency 200ms"
              for node in (0, 1)]
    return [*(f"ip netns add distca{node}" for node in (0, 1)), *(f"ip {one}" for one in made),
            *(f"tc {one}" for one in limits)]


def run(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    try:
        for command in commands(options.rate):
            subprocess.run(command.split(), check=True)
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "seconds.json"
            ranks = [subprocess.Popen(
                ["ip", "netns", "exec", f"distca{node}", sys.executable, __file__, "--rank", str(rank), "--tokens",
                 str(options.tokens), "--repeats", str(options.repeats), "--output", str(answer)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"dca{node}"}) for rank, node in enumerate(NODES)]
            try:
                codes = [rank.wait(timeout=300) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise RuntimeError(f"ranks ended with {codes}")
            seconds = json.loads(answer.read_text())
    finally:
        for node in (0, 1):
            subprocess.run(["ip", "netns", "del", f"distca{node}"], check=False)
    found = between_nodes(plan)
    content = {
        "host": host_facts(), "rate": options.rate, "tokens_per_rank": options.tokens, "repeats": options.repeats,
        "seconds": seconds, "forward_bytes_from_node_0": found, "speedup": seconds["one hop"] / seconds["two hops"],
        "bytes_ratio": found["one hop"] / found["two hops"]}
    print(json.dumps(content, indent=1))
    Path(options.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time one and two hops between namespaces over a link slowed by tc.")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default=str(OUTPUT))
    parser.add_argument("--rank", type=int, help="that this process is; the benchmark starts its ranks by itself")
    chosen = parser.parse_args()
    (run if chosen.rank is None else one_rank)(chosen)
