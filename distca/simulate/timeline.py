"""Time as events on streams: who computes when, who sends when, and who has to wait for whom.

Every pool rank has one computing stream, and links whose two directions run at once: NVLink to the ranks of its own
node and the NIC to all others. Operations take a link or the stream in the order in which they are issued. A transfer
starts when its data is ready and its sender's link is free; a receiver has everything once its own link has taken it
in and the last of its senders is done. Overlap is not assumed anywhere: it comes out where the order allows it.

State is one number per rank, and each operation works on all ranks at once, so a step of thousands of GPUs is a few
thousand numpy calls. Spans are only kept when a trace is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.simulate.costs import Costs
from distca.trace import Span, StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Messages over one kind of link, grouped by receiver."""

    source: np.ndarray       # [messages] ordered by destination
    receivers: np.ndarray    # [receivers] ranks that get anything
    first: np.ndarray        # [receivers] first message of each
    sends: np.ndarray        # [ranks] bool
    out_seconds: np.ndarray  # [ranks]
    in_seconds: np.ndarray   # [receivers]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One all-to-all: the messages between ranks, with the seconds that each end's link needs for them."""

    links: tuple[tuple[int, _Edges], ...]  # (link, messages); link 0 is NVLink, link 1 the NIC
    sent_bytes: np.ndarray                 # [ranks]
    received_bytes: np.ndarray             # [ranks]

    @classmethod
    def of(
        cls, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, num_ranks: int, costs: Costs
    ) -> Exchange:
        """Messages of the same pair travel as one; what stays on its rank is no message."""
        away = (source != target) & (num_bytes > 0)
        pair, at = np.unique(target[away] * num_ranks + source[away], return_inverse=True)
        size = np.bincount(at, weights=num_bytes[away], minlength=len(pair))
        to, origin = pair // num_ranks, pair % num_ranks
        sent = np.bincount(origin, weights=size, minlength=num_ranks)
        received = np.bincount(to, weights=size, minlength=num_ranks)
        same_node = to // costs.pool_ranks_per_node == origin // costs.pool_ranks_per_node
        network = costs.network
        links = []
        for link, mask, latency, bandwidth in (
                (0, same_node, network.intra_node_latency_seconds, network.intra_node_bandwidth),
                (1, ~same_node, network.inter_node_latency_seconds, network.inter_node_bandwidth)):
            if not mask.any():
                continue
            receivers, first = np.unique(to[mask], return_index=True)
            out = np.bincount(origin[mask], weights=size[mask], minlength=num_ranks)
            taken = np.bincount(to[mask], weights=size[mask], minlength=num_ranks)[receivers]
            links.append((link, _Edges(origin[mask], receivers, first, out > 0, latency + out / bandwidth,
                                       latency + taken / bandwidth)))
        return cls(tuple(links), sent, received)

    def without_seconds(self) -> Exchange:
        """The same messages over links that take no time."""
        links = tuple((link, replace(edges, out_seconds=np.zeros_like(edges.out_seconds),
                                     in_seconds=np.zeros_like(edges.in_seconds))) for link, edges in self.links)
        return replace(self, links=links)


class Clock:
    """When each rank's stream and links are free, and what they did."""

    def __init__(self, num_ranks: int, record: bool = False) -> None:
        self.num_ranks = num_ranks
        self.compute_free = np.zeros(num_ranks)
        self.send_free = np.zeros((2, num_ranks))     # [link, ranks]
        self.receive_free = np.zeros((2, num_ranks))
        self.nic_busy = np.zeros(num_ranks)           # seconds of the NIC's busier direction, not counting background
        self._beside: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.busy = np.zeros(num_ranks)
        self.attention = np.zeros(num_ranks)          # of busy
        self._spans: list[tuple[str, str, np.ndarray, np.ndarray, np.ndarray | None]] | None = [] if record else None

    def compute(self, name: str, ready: np.ndarray, seconds: np.ndarray, *, attention: bool = False) -> np.ndarray:
        """Run on the stream once the input is ready; the end per rank. A rank with no seconds runs nothing."""
        start = np.maximum(ready, self.compute_free)
        stop = start + seconds
        runs = seconds > 0
        if self._spans is not None:
            self._keep("wait for " + name, "wait", np.where(runs, self.compute_free, start), start)
            self._keep(name, "attention" if attention else "linear", start, stop)
        self.compute_free = np.where(runs, stop, self.compute_free)
        self.busy += seconds
        if attention:
            self.attention += seconds
        return np.where(runs, stop, ready)

    def exchange(self, name: str, ready: np.ndarray, exchange: Exchange) -> np.ndarray:
        """When each rank has what others send it, and its own data is ready."""
        arrival = ready.copy()
        for link, edges in exchange.links:
            start = np.maximum(ready, self.send_free[link])
            stop = start + edges.out_seconds
            self.send_free[link] = np.where(edges.sends, stop, self.send_free[link])
            to = edges.receivers
            opens = np.minimum.reduceat(start[edges.source], edges.first)
            closes = np.maximum.reduceat(stop[edges.source], edges.first)
            begin = np.maximum(self.receive_free[link][to], opens)
            end = np.maximum(begin + edges.in_seconds, closes)
            self.receive_free[link][to] = end
            if link == 1:
                taken = np.where(edges.sends, edges.out_seconds, 0.0)
                taken[to] = np.maximum(taken[to], edges.in_seconds)
                self.nic_busy += taken
            arrival[to] = np.maximum(arrival[to], end)
            if self._spans is not None:
                self._keep(name, "network", np.where(edges.sends, start, 0), np.where(edges.sends, stop, 0),
                           exchange.sent_bytes)
        return arrival

    def collective(self, name: str, ready: np.ndarray, seconds: np.ndarray, group: int, runs: np.ndarray) -> np.ndarray:
        """A collective of every `group` neighbouring ranks over their NICs, where it runs: starts with the last."""
        if group == 1 or not runs.any():
            return ready
        start = _group_max(np.maximum(ready, np.maximum(self.send_free[1], self.receive_free[1])), group)
        stop = start + seconds
        self.nic_busy += np.where(runs, seconds, 0.0)
        self.send_free[1] = np.where(runs, stop, self.send_free[1])
        self.receive_free[1] = np.where(runs, stop, self.receive_free[1])
        if self._spans is not None:
            self._keep(name, "network", start, stop)
        return np.where(runs, stop, ready)

    def shift(self, name: str, ready: np.ndarray, seconds: np.ndarray, step: int) -> np.ndarray:
        """Rank r sends to rank r + step where it has seconds to send; when each rank has got it, 0 where none sends."""
        source = np.flatnonzero(seconds > 0)
        arrival = np.zeros(self.num_ranks)
        if len(source) == 0:
            return arrival
        start = np.maximum(np.maximum(ready, self.send_free[1])[source], self.receive_free[1][source + step])
        stop = start + seconds[source]
        self.send_free[1][source] = stop
        self.receive_free[1][source + step] = stop
        arrival[source + step] = stop
        if self._spans is not None:
            begin, end = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
            begin[source], end[source] = start, stop
            self._keep(name, "pipeline", begin, end)
        return arrival

    def background(self, name: str, ready: np.ndarray, seconds: np.ndarray) -> None:
        """Traffic beside the step (weights in, gradients out): takes what others leave of the NIC, before the end."""
        if seconds.any():
            self._beside.append((ready, seconds, self.nic_busy.copy()))
            if self._spans is not None:
                self._keep(name, "network", ready, ready + seconds)

    def _beside_done(self) -> np.ndarray:
        """When each rank's NIC is done with it: all from some request on, and what went before it in that time."""
        done, left = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        for ready, seconds, busy in reversed(self._beside):
            left = left + seconds
            done = np.maximum(done, np.where(left > 0, ready + left + self.nic_busy - busy, 0.0))
        return done

    def finish(self, name: str, seconds: np.ndarray) -> float:
        """The step's end: everyone's streams and links are done, then `seconds` more on each rank."""
        done = max(float(self.compute_free.max()), float(self.send_free[1].max()), float(self.receive_free[1].max()),
                   float(self._beside_done().max()))
        if self._spans is not None:
            at = np.full(self.num_ranks, done)
            self._keep("wait for all", "wait", self.compute_free, at)
            self._keep(name, "optimizer", at, at + seconds)
        self.busy += seconds
        return done + float(seconds.max())

    def traces(self, step: int = 0) -> list[StepTrace]:
        """One trace per pool rank; only of a clock that records."""
        assert self._spans is not None, "ask for a recording clock"
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for name, lane, start, stop, num_bytes in self._spans:
            for rank in np.flatnonzero(stop > start).tolist():
                size = 0 if num_bytes is None else int(num_bytes[rank])
                rows[rank].append(Span(name, lane, float(start[rank]), float(stop[rank]), size))
        return [StepTrace(rank, step, tuple(sorted(spans, key=lambda span: span.start_seconds)))
                for rank, spans in enumerate(rows)]

    def _keep(
        self, name: str, lane: str, start: np.ndarray, stop: np.ndarray, num_bytes: np.ndarray | None = None
    ) -> None:
        assert self._spans is not None
        self._spans.append((name, lane, start, stop, num_bytes))


def _group_max(values: np.ndarray, group: int) -> np.ndarray:
    return np.repeat(values.reshape(-1, group).max(axis=1), group)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One nano-batch of a pass: what it makes every rank compute and exchange in a layer, and when its input is there.

    A backward pass has the same form: the segment behind attention comes first, and gradients travel.
    """

    name: str
    ready: np.ndarray      # [ranks]
    opening: np.ndarray    # [ranks] seconds of the segment before attention
    closing: np.ndarray    # [ranks] seconds of the segment behind it
    attention: np.ndarray  # [ranks] seconds as a server
    going: Exchange        # homes to servers
    coming: Exchange       # servers to homes


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """What travels beside a pass, once per layer: weights of the next layer in, or gradients of the last one out."""

    name: str
    seconds: np.ndarray  # [ranks]


def run_layers(
    clock: Clock, rows: Sequence[Row], num_layers: int, *, first: np.ndarray, last: np.ndarray,
    beside: Beside | None = None,
) -> list[np.ndarray]:
    """Run rows through layers in turn, as ping and pong do; one row alone waits for all its exchanges.

    The stream computes segment, segment, attention, attention, so that every exchange has one turn of the other row to
    hide behind. `first` and `last` are seconds in front of the first and behind the last layer (an output head).
    Returns the end of every row.
    """
    state = [clock.compute(row.name, row.ready, row.opening + first) for row in rows]
    for layer in range(num_layers):
        there = [clock.exchange(f"{row.name} to servers", at, row.going) for row, at in zip(rows, state, strict=True)]
        if beside is not None:
            clock.background(beside.name, state[-1], beside.seconds)
        served = []
        for row, at in zip(rows, there, strict=True):
            done = clock.compute(f"{row.name} attention", at, row.attention, attention=True)
            served.append(clock.exchange(f"{row.name} to homes", done, row.coming))
        seconds = [row.closing + (row.opening if layer + 1 < num_layers else last) for row in rows]
        state = [clock.compute(row.name, at, much) for row, at, much in zip(rows, served, seconds, strict=True)]
    return state
