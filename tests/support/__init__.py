"""Random batches and slow, obvious oracles, so that tests of fast code have something plain to agree with.

Everything is drawn by seed. Layouts come in the kinds that loaders produce and one that none would: documents cut
anywhere and scattered over ranks. Oracles count tokens and pairs one by one (or block by block) and share no code with
planning. Attention over a plan runs on fake ranks, threads of one process; torch is imported only for that. Real ranks
are in processes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from distca.planning.micro_batch import MicroBatch
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.packing import pack
from tests.support.processes import ProcessOutcome as ProcessOutcome
from tests.support.processes import run_processes as run_processes
from tests.support.processes import values as values

if TYPE_CHECKING:
    import torch

    from distca.kernels.interface import TaskRows
    from distca.runtime.attention import CoreAttention
    from distca.train.data import Batch


Result = TypeVar("Result")
LayoutKind = Literal["in_order", "no_spanning", "balanced", "scattered"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


def random_lengths(seed: int, num_tokens: int, longest: int | None = None) -> np.ndarray:
    """Document lengths of exactly `num_tokens` tokens: skewed over orders of magnitude, one-token documents among them.

    Some draws are one document or a few equal ones, the cases that averages hide. No document exceeds `longest`.
    """
    rng = np.random.default_rng(seed)
    longest = num_tokens if longest is None else min(longest, num_tokens)
    if rng.random() < 0.15:
        longest = max(longest // int(rng.integers(1, 4)), 1)
        whole, rest = divmod(num_tokens, longest)
        return np.array([longest] * whole + [rest] * (rest > 0), dtype=np.int64)
    lengths: list[int] = []
    left = num_tokens
    while left:
        length = min(int(longest ** rng.random()), left)         # log-uniform from 1 to longest
        lengths.append(length)
        left -= length
    return np.array(lengths, dtype=np.int64)


def random_layout(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int) -> Layout:
    """A layout of `ranks * tokens_per_rank` tokens; `scattered` gives ranks unequal tokens, and some none."""
    total = ranks * tokens_per_rank
    if kind == "scattered":
        return scattered_layout(seed, random_lengths(seed, total), ranks)
    if kind == "no_spanning":
        return pack(random_lengths(seed, total, longest=tokens_per_rank), ranks=ranks, spanning=False)
    return pack(random_lengths(seed, total), ranks=ranks, placement="balanced" if kind == "balanced" else "given")


def scattered_layout(seed: int, lengths: np.ndarray, ranks: int) -> Layout:
    """Documents cut at arbitrary tokens, their slices on arbitrary ranks in arbitrary order."""
    rng = np.random.default_rng(seed)
    allowed = rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))]
    rows: list[tuple[int, int, int, int]] = []
    for document, length in enumerate(lengths.tolist()):
        cuts = np.unique(rng.integers(1, length, size=int(rng.integers(0, 6)))) if length > 1 else np.empty(0)
        edges = [0, *cuts.astype(int).tolist(), length]
        rows += [(document, start, stop, int(rng.choice(allowed))) for start, stop in pairwise(edges)]
    shuffled = np.array(rows, dtype=np.int64)[rng.permutation(len(rows))]
    document, start, stop, rank = shuffled.T
    return layout_from_slices(lengths, document, start, stop, rank, ranks)


def random_speeds(seed: int, ranks: int, dedicated: int = 0) -> np.ndarray:
    """Speeds of a pool of `ranks + dedicated` servers: all alike, unequal, or some ranks that serve nothing."""
    rng = np.random.default_rng(seed)
    num_servers = ranks + dedicated
    if rng.random() < 0.25:
        return np.ones(num_servers)
    speed = rng.uniform(0.25, 2.0, num_servers)
    if rng.random() < 0.5:
        speed[rng.random(num_servers) < 0.3] = 0.0
        speed[rng.integers(num_servers)] = 1.0
    return speed


def misplaced_plan(layout: Layout, servers: int, model: ModelShape, shift: int = 1) -> Plan:
    """Whole slices, each on a wrong server: `shift` ranks behind its home."""
    home = tasks_at_home(layout)
    tasks = replace(home, server=(home.home + shift) % servers)
    return Plan(layout, tasks, np.ones(servers), 0.0, model)


def scattered_plan(seed: int, layout: Layout, servers: int, model: ModelShape) -> Plan:
    """Exact and senseless: queries and keys cut anywhere, every part on a server of its own, none at home by design."""
    rng = np.random.default_rng([seed, 1])                        # not the draws that made the layout
    allowed = rng.permutation(servers)[: int(rng.integers(1, servers + 1))]
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for document, start, stop, home in zip(layout.document.tolist(), layout.start.tolist(), layout.stop.tolist(),
                                           layout.rank.tolist(), strict=True):
        for q_start, q_stop in pairwise(_cut(rng, start, stop)):
            edges = [0, q_stop] if q_start == 0 or rng.random() < 0.3 else [*_cut(rng, 0, q_start), q_stop]
            if len(edges) > 2 and rng.random() < 0.5:
                del edges[-2]                                    # the diagonal takes the keys before it along
            rows += [(document, q_start, q_stop, kv_start, kv_stop, home, int(rng.choice(allowed)))
                     for kv_start, kv_stop in pairwise(edges)]
    tasks = TaskTable(*np.array(rows, dtype=np.int64)[rng.permutation(len(rows))].T)
    return Plan(layout, tasks, np.ones(servers), 0.0, model)


def _cut(rng: np.random.Generator, start: int, stop: int) -> list[int]:
    inner = rng.integers(start + 1, stop, size=int(rng.integers(0, 4))) if stop - start > 1 else np.empty(0, dtype=int)
    return [start, *np.unique(inner).tolist(), stop]


def dense_coverage(lengths: np.ndarray, tasks: TaskTable) -> list[np.ndarray]:
    """Per document, how often each (query, key) pair is computed: [length, length] counts, for short documents."""
    counts = [np.zeros((length, length), dtype=np.int64) for length in lengths.tolist()]
    for document, q_start, q_stop, kv_start, kv_stop in _task_rows(tasks):
        counts[document][q_start:q_stop, kv_start:kv_stop] += 1
    return [np.tril(count) for count in counts]


def covers_exactly_once(lengths: np.ndarray, tasks: TaskTable) -> bool:
    """Whether every causal pair of every document is computed once and no task reads keys that none of its queries see.

    Each document's (query, key) square is cut into blocks wherever any task begins or ends, the same cuts on both
    sides; a block below the diagonal is then inside a task or outside it, and so is the triangle of one on it.
    """
    rows: dict[int, list[tuple[int, int, int, int]]] = {document: [] for document in range(len(lengths))}
    for document, q_start, q_stop, kv_start, kv_stop in _task_rows(tasks):
        if document not in rows or not (0 <= q_start < q_stop <= lengths[document]):
            return False
        if not 0 <= kv_start < kv_stop <= q_stop:
            return False
        rows[document].append((q_start, q_stop, kv_start, kv_stop))
    for document, bounds in rows.items():
        edges = sorted({0, int(lengths[document]), *(edge for row in bounds for edge in row)})
        at = {edge: index for index, edge in enumerate(edges)}
        count = np.zeros((len(edges) - 1, len(edges) - 1), dtype=np.int64)  # [runs of queries, runs of keys]
        for q_start, q_stop, kv_start, kv_stop in bounds:
            count[at[q_start]:at[q_stop], at[kv_start]:at[kv_stop]] += 1
        if (count[np.tril_indices(len(count))] != 1).any():
            return False
    return True


def tokens_moved(layout: Layout, tasks: TaskTable, num_servers: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key tokens that cross ranks, as [home, server] counts: each token once per server that reads it."""
    homes = [np.empty(length, dtype=np.int64) for length in layout.lengths.tolist()]
    slices = layout.keys()
    for document, start, stop, rank in zip(slices.document.tolist(), slices.start.tolist(), slices.stop.tolist(),
                                           slices.rank.tolist(), strict=True):
        homes[document][start:stop] = rank
    queries: dict[tuple[int, int], np.ndarray] = {}              # (document, server) -> is this position read there
    keys: dict[tuple[int, int], np.ndarray] = {}
    for server, (document, q_start, q_stop, kv_start, kv_stop) in zip(tasks.server.tolist(), _task_rows(tasks),
                                                                      strict=True):
        unread = np.zeros(int(layout.lengths[document]), dtype=bool)
        queries.setdefault((document, server), unread.copy())[q_start:q_stop] = True
        keys.setdefault((document, server), unread)[kv_start:kv_stop] = True
    moved = []
    for needed in (queries, keys):
        count = np.zeros((num_servers, num_servers), dtype=np.int64)
        for (document, server), read in needed.items():
            count[:, server] += np.bincount(homes[document][read], minlength=num_servers)
        np.fill_diagonal(count, 0)
        moved.append(count)
    return moved[0], moved[1]


def _task_rows(tasks: TaskTable) -> list[tuple[int, int, int, int, int]]:
    columns = (tasks.document, tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def random_qkv(
    seed: int, num_tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout of documents laid end to end, float64 unless told otherwise."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim))
    q, k, v, dout = (torch.randn(num_tokens, *shape, generator=generator, dtype=dtype or torch.float64)
                     for shape in shapes)
    return q, k, v, dout


def qkv_of(row: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a call takes them: three, where a list could hold any number."""
    q, k, v = row
    return q, k, v


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    """What backward left in a leaf; it has to have left something."""
    assert leaf.grad is not None, "backward did not reach this leaf"
    return leaf.grad


def greedy(logits: torch.Tensor, off: float = 1e-5) -> torch.Tensor:
    """The best token of each row of logits, which any rounding picks: the next best is out of its reach.

    Two runs whose logits are off by rounding, each by at most `off` of itself and of 1, choose the same token only if
    the best logit leads by more than both can be off. Checked, so that a comparison of tokens holds on any machine.
    """
    best, tokens = logits.topk(2)
    assert (best[..., 0] - best[..., 1] > 2 * off * (1 + best.abs().amax(-1))).all(), "rounding decides the best token"
    return tokens[..., 0]


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line that a call is refused with."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError(f"{call} was not refused")


def task_rows(*columns: Sequence[int]) -> TaskRows:
    """TaskRows of columns written by hand."""
    from distca.kernels.interface import TaskRows

    return TaskRows(*(np.array(column) for column in columns))


def row_index(layout: Layout, rank: int) -> torch.Tensor:
    """Where each token of a rank's row stands when all documents are laid end to end."""
    import torch

    tokens = layout.tokens(rank)
    begin = np.cumsum(layout.lengths) - layout.lengths
    return torch.from_numpy(begin[tokens.document] + tokens.position)


def nano_index(micro_batch: MicroBatch, nano: int, rank: int) -> torch.Tensor:
    """The same of a rank's row in a nano-batch, for the documents of the whole micro-batch."""
    import torch

    tokens = micro_batch.layouts[nano].tokens(rank)
    begin = np.cumsum(micro_batch.lengths) - micro_batch.lengths
    return torch.from_numpy(begin[micro_batch.nano_batches[nano].document[tokens.document]] + tokens.position)


def document_columns(lengths: Sequence[int], vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens of documents laid end to end, with their labels and positions."""
    import torch
    import torch.nn.functional as F

    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in tokens.split(list(lengths))])
    return tokens, labels, torch.cat([torch.arange(length) for length in lengths])


def batch_of(plan: StepPlan, rank: int, vocab: int) -> Batch:
    """A data rank's rows of a step whose micro-batch m is `document_columns(…, seed=m)`."""
    from distca.train.data import Batch, Row

    rows = []
    for number, micro_batch in enumerate(plan.micro_batches):
        tokens, labels, positions = document_columns(micro_batch.lengths.tolist(), vocab, number)
        at = [nano_index(micro_batch, nano, rank) for nano in range(plan.num_nano_batches)]
        rows.append(tuple(Row(tokens[index], labels[index], positions[index], micro_batch.key_runs(nano, rank))
                          for nano, index in enumerate(at)))
    return Batch(tuple(rows), plan, plan.summary(), 0.0, 0.0, plan.num_labels)


def from_rows(rows: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Every rank's row, put back into documents laid end to end."""
    whole = rows[0].new_empty((layout.num_tokens, *rows[0].shape[1:]))
    for rank, row in enumerate(rows):
        whole[row_index(layout, rank)] = row
    return whole


def on_fake_ranks(
    plan: Plan, body: Callable[[CoreAttention], Result], *, node: Sequence[int] | None = None, **options: Any
) -> list[Result]:
    """Run `body` on a thread per rank of the layout, while the pool's dedicated servers serve until all are done.

    `node` of every rank of the pool makes exchanges go in two hops.
    """
    from distca.runtime.attention import CoreAttention
    from distca.runtime.dedicated import serve_until_stopped, stop_servers
    from distca.runtime.transport import HierarchicalTransport, LoopbackTransport, LoopbackWorld, Transport

    worlds = {} if node is None else {one: LoopbackWorld(list(node).count(one), timeout_seconds=20.0) for one in node}

    def one(loopback: LoopbackTransport) -> Any:
        transport: Transport = loopback
        if node is not None:
            here = node[loopback.rank]
            inner = LoopbackTransport(worlds[here], list(node[:loopback.rank]).count(here))
            transport = HierarchicalTransport(loopback, inner, node)
        attend = CoreAttention(transport=transport, **options)
        if transport.rank >= plan.layout.num_ranks:
            return serve_until_stopped(attend)
        result = body(attend)
        stop_servers(attend, plan)
        return result

    return LoopbackWorld(plan.num_servers, timeout_seconds=20.0).run(one)[: plan.layout.num_ranks]


def attend_on_fake_ranks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, plan: Plan, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv of documents laid end to end, computed where the plan says; options are CoreAttention's.

    With `sinks` their gradient follows.
    """

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(plan.layout, attend.transport.rank)
        row = qkv_of(x.detach()[index].requires_grad_() for x in (q, k, v))
        own = None if sinks is None else sinks.detach().clone().requires_grad_()
        out = attend(*row, plan, scale=scale, window=window, softcap=softcap, sinks=own)
        out.backward(dout[index])
        return out.detach(), *map(gradient, row), *(() if own is None else (gradient(own),))

    out, dq, dk, dv, *dsinks = zip(*on_fake_ranks(plan, body, **options), strict=True)
    return *(from_rows(field, plan.layout) for field in (out, dq, dk, dv)), *(sum(each) for each in dsinks)


def dense_on_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, lengths: np.ndarray,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv by the formula, in one piece; with `sinks` their gradient follows."""
    import torch

    from distca.kernels import dense_attention

    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out = dense_attention(*qkv_of(leaves[:3]), lengths.tolist(), scale, window, softcap, *leaves[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@contextmanager
def determinism(wanted: bool = True) -> Iterator[None]:
    """torch's deterministic algorithms inside, or not; outside it is as it was."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
