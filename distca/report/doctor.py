"""Judge what `distca doctor` found: what is wrong, what is only worth knowing, and one screen that says both.

A record per rank comes from profiling/doctor.py. Wrong are results, versions that differ and hosts that cannot be told
apart; slow ranks and links are notes. Imports without torch, to say that torch is missing.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from statistics import median, median_low
from typing import Any

Record = dict[str, Any]
EXTRAS = {  # of pyproject.toml: what each is for, and its packages
    "train": ("to train", ("torch", "safetensors", "xxhash")),
    "data": ("to read tables, chats and compressed files", ("jinja2", "pyarrow", "tokenizers", "zstandard")),
    "transformers": ("for Transformers", ("torch", "transformers", "accelerate")),
    "torchtitan": ("for torchtitan", ("torch", "torchtitan", "triton")),
    "megatron-core": ("for Megatron-Core", ("torch", "megatron-core")), "text": ("to tokenize", ("tokenizers",)),
    "tensorboard": ("to log", ("tensorboard",)), "wandb": ("to log", ("wandb",)), "plot": ("to plot", ("matplotlib",)),
    "nixl": ("for links over NIXL", ("nixl",)),
}
SLOW = {  # how many times the median is worth a note, and why
    "cuda": (1.15, "GPUs of one model commonly differ by 8 %, and every step waits for the slowest"),
    "cpu": (2.0, "ranks on CPUs share cores and memory with other processes"),
}
SLOW_LINK = 1.5
MAX_NOTES = 8
NEXT = ("distca plan LENGTHS says what balancing saves, distca profile measures this device for plans, "
        "distca train examples/demo.toml trains")


def report(ranks: list[Record], broken: str = "is not installed") -> Record:
    """Return what `distca doctor --json` prints; no ranks: torch is `broken`."""
    missing = {extra: absent for extra, (_, packages) in EXTRAS.items() if (absent := [*filter(_is_absent, packages)])}
    problems = [*_problems(ranks)] if ranks else [
        f"torch {broken}: only plan, simulate and report run; run: pip install "
        f"{'' if 'torch' in missing.get('train', ()) else '--force-reinstall '}{' '.join(EXTRAS['train'][1])}"]
    links = {kind: {"links": len(some), "bandwidth": median(one["bandwidth"] for one in some),
                    "slowest_bandwidth": min(one["bandwidth"] for one in some),
                    "latency_seconds": median(one["latency_seconds"] for one in some)}
             for kind, some in _links(ranks).items()}
    return {"format": "distca-doctor", "version": 1, "ok": not problems, "problems": problems,
            "notes": [*_notes(ranks)][:MAX_NOTES], "missing": missing, "links": links, "ranks": ranks}


def _is_absent(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package != "zstandard" or sys.version_info < (3, 14)  # from 3.14 on Python has its own
    return False


def _problems(ranks: list[Record]) -> Iterator[str]:
    for name in sorted({name for one in ranks for name in one["versions"]}):
        by_value = _grouped((one["versions"].get(name, "none"), rank) for rank, one in enumerate(ranks))
        if len(by_value) > 1:
            yield (f"{name} differs: {_on(by_value)}; give all ranks the same"
                   f"{'' if 'speed' in ranks[0] else '. Nothing else was examined'}")
    for host, machines in _grouped((one["host"], one["machine"]) for one in ranks).items():
        if len(set(machines)) > 1:
            yield f"{len(set(machines))} machines have the host name {host!r}; give each its own, to tell nodes apart"
    for found in zip(*(one.get("attention", ()) for one in ranks), strict=True):
        name = found[0]["transport"]
        if found[0]["refused"]:
            yield f"transport {name} cannot be set up: {found[0]['refused']}; keep to attention.transport c10d"
            continue
        allowed = f"of the result, and rounding explains {found[0]['allowed']:.1e}"
        wrong = _grouped((server, (home, off)) for home, one in enumerate(found)
                         for server, off in zip(one["servers"], one["off"], strict=True) if off > one["allowed"])
        for server, parts in sorted(wrong.items()):
            homes, off = {home for home, _ in parts}, max(off for _, off in parts)
            what, remedy = (("computes wrong attention", "try another attention.kernel there") if server in homes else
                            (f"returns wrong attention to {numbers(homes)}", "check the links between them"))
            yield f"{ranks[server]['name']} {what} over transport {name}, off by {off:.1e} {allowed}: {remedy}"
        for home, one in enumerate(found):
            if not wrong and one["keys_off"] > one["allowed"]:
                yield (f"{ranks[home]['name']} gets wrong gradients of keys over transport {name}, off by "
                       f"{one['keys_off']:.1e} {allowed}")


def _notes(ranks: list[Record]) -> Iterator[str]:
    devices = _grouped((one["device"], rank) for rank, one in enumerate(ranks))
    if len(devices) > 1:
        yield f"devices differ: {_on(devices)}; profile each kind"
    for gpu, some in _grouped((one["gpu"], rank) for rank, one in enumerate(ranks) if one["gpu"]).items():
        if len(some) > 1:
            yield f"{numbers(some)} share one GPU, {gpu}; their speeds were measured one after the other"
    if any("driver" in one["versions"] and one["kind"] == "cpu" for one in ranks):
        yield "an NVIDIA driver is here but torch finds no GPU: install a torch that is built with CUDA for this driver"
    for device, some in devices.items():
        yield from _slow(device, [ranks[rank] for rank in some if "speed" in ranks[rank]])
    for kind, links in _links(ranks).items():
        usual = median(one["bandwidth"] for one in links)
        slow = [one for one in links if usual > SLOW_LINK * one["bandwidth"]]
        of_rank = _grouped((rank, one) for one in links for rank in (one["from"], one["to"]))
        ends = [rank for rank, own in of_rank.items() if len(own) < len(links) and all(one in slow for one in own)]
        named = [(f"all links {kind} of {ranks[rank]['name']} have", of_rank[rank]) for rank in ends] + [
            (f"the link {kind} from {ranks[one['from']]['name']} to {ranks[one['to']]['name']} has", [one])
            for one in slow if not {one["from"], one["to"]} & set(ends)]
        for text, some in named:
            rate = max(one["bandwidth"] for one in some)
            yield (f"{text} {rate / 1e9:.3g} GB/s, {usual / rate:.2g} times less than the median (noted from "
                   f"{SLOW_LINK}: less is common where links share switches or cores)")


def _slow(device: str, ranks: list[Record]) -> Iterator[str]:
    for what, seconds in (("matrix products take", [one["speed"]["linear_seconds"] for one in ranks]),
                          ("attention takes", [sum(one["speed"]["attention_seconds"]) for one in ranks]),
                          ("copies take", [1 / one["speed"]["copy_bytes_per_second"] for one in ranks])):
        for one, taken in zip(ranks, seconds, strict=True):
            (most, why), ratio = SLOW[one["kind"]], taken / median_low(seconds)
            if ratio > most:
                yield f"{one['name']}: {what} {ratio:.2f} times the median on {device} (noted from {most}: {why})"
    for one in ranks:
        for way, ratio in zip(("forward", "backward"), _beside_table(one["speed"]), strict=False):
            if ratio > SLOW[one["kind"]][0]:
                yield f"{one['name']}: attention {way} takes {ratio:.2f} times what {one['speed']['table']!r} says"


def _beside_table(speed: Record) -> list[float]:
    """Return forward's and backward's seconds over those of the shipped table; empty without a table."""
    return [own / its for own, its in zip(speed["attention_seconds"], speed["table_seconds"], strict=False)]


def _links(ranks: list[Record]) -> dict[str, list[Record]]:
    return _grouped((f"{'between' if one['between_nodes'] else 'inside'} nodes", one)
                    for rank in ranks for one in rank.get("links", ()))


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _on(ranks_of: dict[str, list[int]]) -> str:
    return ", ".join(f"{value} on {numbers(some)}" for value, some in ranks_of.items())


def numbers(ranks: Iterable[int]) -> str:
    """Format rank numbers: ranks 0-3, 8."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {text}"


def page(found: Record) -> list[str]:
    """Return the report as lines of text."""
    rows = [*_facts(found)] if found["ranks"] else []
    rows += [("missing", f"{EXTRAS[extra][0]} (extra {extra}): pip install {' '.join(packages)}")
             for extra, packages in found["missing"].items()]
    rows += [("note", one) for one in found["notes"]] + [("WRONG", one) for one in found["problems"]]
    rows.append(("next", NEXT if found["ok"] else "mend what is wrong, and run distca doctor again"))
    return [f"{label:<10} {text}" for label, text in rows]


def _facts(found: Record) -> Iterator[tuple[str, str]]:
    ranks: list[Record] = found["ranks"]
    first = ranks[0]
    yield "hosts", "; ".join(f"{host}: {numbers(some)}" for host, some in _grouped(
        (one["host"], rank) for rank, one in enumerate(ranks)).items())
    memory = f"{first['memory_bytes'] / 1e9:.0f} GB" if first["gpu"] else "no GPU"
    yield "device", f"{first['device']}, {memory}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    runs = [name for name, reason in first["kernels"].items() if reason is None]
    yield "kernels", f"run here: {', '.join(runs)}"
    if first["gpu"]:
        yield from (("", f"not {name}: {reason}") for name, reason in first["kernels"].items() if reason is not None)
    elif len(runs) < len(first["kernels"]):
        yield "", f"not {', '.join(name for name in first['kernels'] if name not in runs)}: they need an NVIDIA GPU"
    for of_ranks in zip(*(one.get("attention", ()) for one in ranks), strict=True):
        if not of_ranks[0]["refused"]:
            off, one = max(max(*one["off"], one["keys_off"]) for one in of_ranks), of_ranks[0]
            yield "attention", (
                f"{'exact' if off <= one['allowed'] else 'WRONG'} over transport {one['transport']}, "
                f"{one['moved']} of {one['tasks']} tasks moved{' in two hops' if one['hops'] == 2 else ''}: off by "
                f"{off:.1e} of the result, forward and backward, and rounding explains {one['allowed']:.1e}")
    for kind, one in found["links"].items():
        yield "links", (f"{kind}: {one['bandwidth'] / 1e9:.3g} GB/s, {one['latency_seconds'] * 1e6:.0f} µs; slowest of "
                        f"{one['links']}: {one['slowest_bandwidth'] / 1e9:.3g} GB/s")
    if "speed" in first:
        slowest = max((one["speed"] for one in ranks), key=lambda speed: sum(speed["attention_seconds"]))
        ratios = " and ".join(f"{ratio:.2f}" for ratio in _beside_table(slowest))
        yield "speed", (f"{slowest['kernel']}: {slowest['attention_seconds'][0] * 1e3:.3g} ms forward, "
                        f"{slowest['attention_seconds'][1] * 1e3:.3g} backward on the slowest rank, " + (
                            f"{ratios} times the shipped table {slowest['table']!r}" if ratios else
                            f"and no latency table ships for {first['device']} with this kernel"))
