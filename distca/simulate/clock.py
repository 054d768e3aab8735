"""Simulate time as events on streams: when each rank computes, sends and waits.

Every pool rank has one computing stream and two full-duplex links: NVLink to the ranks of its own node and the NIC to
all others. Operations use a link or the stream in the order in which they are issued. A transfer starts when its data
is ready and its sender's link is free. A receiver is done once its own link has received everything and the last of its
senders is done. Overlap is not assumed anywhere: it results where the order allows it.

State is one number per rank, and each operation works on all ranks at once, so a step of thousands of GPUs is a few
thousand numpy calls. Spans are kept only for a trace, on the lanes of the runtime's recorder; transfers, which the
runtime cannot see, have a separate lane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.cost.network import Network
from distca.trace import Span, StepTrace

NVLINK, NIC = 0, 1
_NOTHING = np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Messages over one kind of link, grouped by receiver; `over` a network fills the last three fields."""

    senders: np.ndarray    # [senders] ranks that send anything
    receivers: np.ndarray  # [receivers] ranks that receive anything
    source: np.ndarray     # [messages] index into senders; messages are sorted by receiver
    first: np.ndarray      # [receivers] index of each one's first message
    num_bytes: np.ndarray  # [sent or received, inside a pod or between pods, ranks]
    out: np.ndarray        # [senders] seconds
    taken: np.ndarray      # [receivers] seconds
    busy: np.ndarray       # [ranks] seconds of the busier direction

    def over(self, latency: float, bandwidths: tuple[float, float]) -> _Edges:
        """Add the seconds that each end's link needs."""
        sent, received = (self.num_bytes / np.array(bandwidths)[:, None]).sum(axis=1)
        busy = np.maximum(sent, received)
        return replace(self, out=latency + sent[self.senders], taken=latency + received[self.receivers],
                       busy=np.where(self.num_bytes.any(axis=(0, 1)), latency + busy, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """One all-to-all: messages between ranks in bytes, and `over` a network also in seconds."""

    links: tuple[tuple[int, _Edges], ...]  # (NVLINK or NIC, messages)
    sent_bytes: np.ndarray                 # [ranks]

    @classmethod
    def of(
        cls, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, num_ranks: int, ranks_per_node: int,
        ranks_per_pod: int = 0,
    ) -> AllToAll:
        """Join messages of the same pair of ranks and drop local ones; ranks_per_pod 0 means a single pod."""
        away = (source != target) & (num_bytes > 0)
        pair, at = np.unique(target[away] * num_ranks + source[away], return_inverse=True)
        size = np.bincount(at, weights=num_bytes[away], minlength=len(pair))
        to, origin = pair // num_ranks, pair % num_ranks
        same_node = to // ranks_per_node == origin // ranks_per_node
        other_pod = (to // (ranks_per_pod or num_ranks) != origin // (ranks_per_pod or num_ranks)).astype(np.int64)
        links = []
        for link, mask in ((NVLINK, same_node), (NIC, ~same_node)):
            if mask.any():
                senders, at = np.unique(origin[mask], return_inverse=True)
                receivers, first = np.unique(to[mask], return_index=True)
                loads = np.stack([np.bincount((other_pod * num_ranks + ranks)[mask], weights=size[mask],
                                              minlength=2 * num_ranks).reshape(2, -1) for ranks in (origin, to)])
                links.append((link, _Edges(senders, receivers, at, first, loads, *(_NOTHING,) * 3)))
        return cls(tuple(links), np.bincount(origin, weights=size, minlength=num_ranks))

    def over(self, network: Network) -> AllToAll:
        """Add the seconds that each end's link needs."""
        of_link = {NVLINK: (network.intra_node_latency_seconds, (network.intra_node_bandwidth,) * 2),
                   NIC: (network.inter_node_latency_seconds, network.nic_bandwidths)}
        return replace(self, links=tuple((link, edges.over(*of_link[link])) for link, edges in self.links))


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Attention call of groups of `size` neighbours, which gather keys in forward and scatter gradients in backward.

    A group either waits for all its keys or computes chunk by chunk as they arrive; `lead` and `tail` describe both.
    Forward attention ends `lead` after the ring began, or `seconds` after attention could start if that is later. The
    backward ring ends `tail` after the group's last attention.
    """

    size: int
    runs: np.ndarray      # [ranks] bool
    backward: np.ndarray  # [ranks] bool
    seconds: np.ndarray   # [ranks]
    lead: np.ndarray      # [ranks]
    tail: np.ndarray      # [ranks]
    travel: np.ndarray    # [ranks] seconds that the ring takes of the NIC

    def start(self, clock: Clock, ready: np.ndarray) -> np.ndarray:
        return ready

    def serve(self, clock: Clock, there: np.ndarray) -> np.ndarray:
        return clock.ring(there, self)


class Clock:
    """Per rank, when its stream and links become free, and totals of their work."""

    def __init__(self, num_ranks: int, record: bool = False) -> None:
        self.num_ranks = num_ranks
        self.compute_free = np.zeros(num_ranks)
        self.send_free = np.zeros((2, num_ranks))     # [link, ranks]
        self.receive_free = np.zeros((2, num_ranks))
        self.nic_busy = np.zeros(num_ranks)           # seconds of the NIC's busier direction, not counting background
        self.busy = np.zeros(num_ranks)
        self.attention = np.zeros(num_ranks)          # part of busy
        self.sent_bytes = np.zeros(num_ranks)         # by exchanges
        self._background: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._spans: list[tuple[str, str, np.ndarray, np.ndarray, np.ndarray | None]] | None = [] if record else None

    def compute(self, name: str, lane: str, ready: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Run on the stream once the data is `ready`; return the end per rank. A rank with no seconds runs nothing."""
        start = np.maximum(ready, self.compute_free)
        stop = start + seconds
        runs = seconds > 0
        if self._spans is not None:
            self.span("exchange", "wait", np.where(runs, self.compute_free, start), start)
            self.span(name, lane, start, stop)
        self.compute_free = np.where(runs, stop, self.compute_free)
        self.busy += seconds
        if lane == "attention":
            self.attention += seconds
        return np.where(runs, stop, ready)

    def hold(self, until: np.ndarray, name: str | None = None) -> None:
        """Make the stream wait until the given times; a name records the wait as a span."""
        held = np.maximum(self.compute_free, until)
        if name is not None:
            self.span(name, "wait", self.compute_free, held)
        self.compute_free = held

    def exchange(self, name: str, ready: np.ndarray, exchange: AllToAll) -> np.ndarray:
        """Send messages; return when each rank has received all of its messages and is ready."""
        arrival = ready.copy()
        self.sent_bytes += exchange.sent_bytes
        for link, edges in exchange.links:
            sends, to, free, taken = edges.senders, edges.receivers, self.send_free[link], self.receive_free[link]
            start = np.maximum(ready[sends], free[sends])
            free[sends] = stop = start + edges.out
            opens = np.minimum.reduceat(start[edges.source], edges.first)
            closes = np.maximum.reduceat(stop[edges.source], edges.first)
            taken[to] = end = np.maximum(np.maximum(taken[to], opens) + edges.taken, closes)
            arrival[to] = np.maximum(arrival[to], end)
            if link == NIC:
                self.nic_busy += edges.busy
            if self._spans is not None:
                begin, until = np.zeros((2, self.num_ranks))
                begin[sends], until[sends] = start, stop
                self.span(name, "network", begin, until, exchange.sent_bytes)
        return arrival

    def all_to_all(
        self, name: str, ready: np.ndarray, link: int, num_bytes: np.ndarray, seconds: np.ndarray, group: int
    ) -> np.ndarray:
        """Exchange within groups of `group` neighbours, all of which have received when the last of them is done.

        A group takes part if any of its ranks has bytes to send.
        """
        if not num_bytes.any():
            return ready
        whole = self.num_ranks // group * group                  # dedicated servers follow
        part = np.append(group_max(num_bytes[:whole], group) > 0, np.zeros(self.num_ranks - whole, dtype=bool))
        start = np.max([ready, self.send_free[link], self.receive_free[link]], axis=0)
        stop = np.where(part, start + seconds, 0.0)
        for free in (self.send_free[link], self.receive_free[link]):
            np.copyto(free, stop, where=part)
        if link == NIC:
            self.nic_busy += np.where(part, seconds, 0.0)
        self.span(name, "network", start, stop, num_bytes)
        return np.where(part, np.append(group_max(stop[:whole], group), stop[whole:]), ready)

    def ring(self, ready: np.ndarray, ring: Ring) -> np.ndarray:
        """Run attention while keys travel around the ring; return when each rank has finished both."""
        start = np.maximum(ready, self.compute_free)
        link_free = np.maximum(self.send_free[NIC], self.receive_free[NIC])
        begin, last, open_link = (group_max(column, ring.size) for column in (
            np.maximum(start, link_free), start + ring.seconds, link_free))
        stop = np.where(ring.backward, np.maximum(last + ring.tail, open_link + ring.travel),
                        np.maximum(start + ring.seconds, begin + ring.lead))
        stop = np.where(ring.runs, stop, start)
        for link in (self.send_free[NIC], self.receive_free[NIC]):
            np.copyto(link, np.where(ring.backward, stop, begin + ring.travel), where=ring.runs)
        self.nic_busy += ring.travel
        self.busy += ring.seconds
        self.attention += ring.seconds
        if self._spans is not None:
            begins = np.where(ring.backward, start, stop - ring.seconds)  # chunks are drawn as one span
            self.span("exchange", "wait", self.compute_free, np.where(ring.runs, begins, 0))
            self.span("attention forward", "attention", begins, np.where(ring.backward, 0, stop))
            self.span("attention backward", "attention", start, np.where(ring.backward, start + ring.seconds, 0))
            self.span("exchange", "wait", start + ring.seconds, np.where(ring.backward, stop, 0))
            travels = ring.runs & (ring.travel > 0)
            self.span("gather keys", "network", begin, np.where(travels & ~ring.backward, begin + ring.travel, 0))
            self.span("scatter key gradients", "network", stop - ring.travel,
                      np.where(travels & ring.backward, stop, 0))
        self.compute_free = np.where(ring.runs, stop, self.compute_free)
        return stop

    def shift(
        self, name: str, ready: np.ndarray, posted: np.ndarray, seconds: np.ndarray, sends: np.ndarray, offset: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Send from each rank r in `sends` to r + offset, once r is ready, its link free and the receive posted.

        Return when each rank has received and when each has sent; 0 for ranks that do not.
        """
        source = np.flatnonzero(sends)
        arrival, sent = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        if len(source) == 0:
            return arrival, sent
        target = source + offset
        start = np.max([ready[source], posted[target], self.receive_free[NIC][target]], axis=0)
        stop = start + seconds[source]
        self.send_free[NIC][source] = np.maximum(self.send_free[NIC][source], ready[source]) + seconds[source]
        self.receive_free[NIC][target] += seconds[source]        # a message that waits for its receiver holds no link
        self.nic_busy[source] += seconds[source]
        arrival[target] = sent[source] = stop
        if self._spans is not None:
            begin = np.zeros(self.num_ranks)
            begin[source] = start
            self.span(name, "network", begin, sent)
        return arrival, sent

    def background(self, name: str, ready: np.ndarray, seconds: np.ndarray) -> None:
        """Send weights or gradients over the NIC whenever no foreground traffic uses it."""
        if seconds.any():
            self._background.append((ready, seconds, self.nic_busy.copy()))
            self.span(name, "network", ready, ready + seconds)

    def _background_done(self) -> np.ndarray:
        """Completion time of background traffic per rank, given what foreground traffic leaves of the NIC."""
        done, left = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        for ready, seconds, busy in reversed(self._background):
            left = left + seconds
            done = np.maximum(done, np.where(left > 0, ready + left + self.nic_busy - busy, 0.0))
        return done

    def finish(self, seconds: np.ndarray) -> float:
        """Run the optimizer after all streams and links are done; return when it ends."""
        done = max(float(self.compute_free.max()), float(self.send_free[NIC].max()),
                   float(self.receive_free[NIC].max()), float(self._background_done().max()))
        self.span("optimizer", "optimizer", self.compute_free, np.where(seconds > 0, done + seconds, 0))
        self.busy += seconds
        return done + float(seconds.max())

    def traces(self, step: int = 0) -> list[StepTrace]:
        """Return the recorded traces, one per pool rank."""
        assert self._spans is not None, "ask for a recording clock"
        of_rank: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for name, lane, start, stop, num_bytes in self._spans:
            for rank in np.flatnonzero(stop > start).tolist():
                size = 0 if num_bytes is None else int(num_bytes[rank])
                of_rank[rank].append(Span(name, lane, float(start[rank]), float(stop[rank]), size))
        return [StepTrace(rank, step, tuple(sorted(spans, key=lambda span: span.start_seconds)))
                for rank, spans in enumerate(of_rank)]

    def span(
        self, name: str, lane: str, start: np.ndarray, stop: np.ndarray, num_bytes: np.ndarray | None = None
    ) -> None:
        """Record a span on every rank where stop > start, if the clock records."""
        if self._spans is not None:
            self._spans.append((name, lane, start, stop, num_bytes))


def group_max(values: np.ndarray, group: int) -> np.ndarray:
    """Maximum over each group of `group` neighbours, repeated for every member."""
    return np.repeat(values.reshape(-1, group).max(axis=1), group)
