"""Interface of attention kernels: tasks in packed buffers, and the visibility rule.

A server holds queries and keys of many documents in flat buffers. An entry of `TaskRows` is one CA-task in them:
queries q[q_begin:q_end] against keys k[k_begin:k_end]. Key j of the task has position j, query i has position
q_offset + i, and a query sees the keys with

    key position <= query position   and, with a window w,   key position > query position - w.

So q_offset = k_len - q_len is the usual causal task whose queries align with the end of their keys, and
q_offset >= k_len - 1 is a full rectangle, a partial key range off the diagonal. Key ranges of different tasks may
overlap (a shared prefix is stored once), and so may query ranges: a query in several tasks gets the attention over all
their keys together, merged exactly through the log-sum-exp. A (query, key) pair in two tasks counts twice; a plan has
each pair once.

Backward takes the merged out and log-sum-exp. A pair's probability exp(score - lse) and a query's delta, the sum of
dout * out over the head dim, are those of the whole softmax. So a task needs no state from forward, on whichever rank
the query's other tasks ran. The log-sum-exp needs no gradient, since it is used only to merge partial outs.

Softcap c replaces a score by c * tanh(score / c) before the mask, so each kernel must implement it. A sink is one more
key of a head, with a learned score and a value of 0. It is merged once into a query's attention over all its keys, so
sinks work with every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from distca.validation import UserError


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are computed from q·k: scaled, masked by a sliding window, and capped.

    `scale` defaults to head_dim ** -0.5; `window` is the number of keys that a query sees, its own included; `softcap`
    c replaces a score by c * tanh(score / c).
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(
                f"window={self.window}; give a positive number of tokens, or None for full causal attention")
        if self.softcap is not None and not self.softcap > 0:
            raise UserError(f"softcap={self.softcap}; give a positive number, or None for scores as they are")


PLAIN = Scores()


@dataclass(frozen=True, slots=True)
class TaskRows:
    """One entry per CA-task: queries [q_begin, q_end) against keys [k_begin, k_end), first query at q_offset."""

    q_begin: np.ndarray  # [tasks]
    q_end: np.ndarray  # [tasks]
    k_begin: np.ndarray  # [tasks]
    k_end: np.ndarray  # [tasks]
    q_offset: np.ndarray  # [tasks] position of the first query minus position of the first key

    def __post_init__(self) -> None:
        for field in fields(self):
            column = np.array(getattr(self, field.name), dtype=np.int64)
            if column.ndim != 1:
                raise UserError(f"TaskRows.{field.name} has shape {column.shape}; give one number per row")
            column.setflags(write=False)
            object.__setattr__(self, field.name, column)
        sizes = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(sizes.values())) != 1:
            raise UserError(f"TaskRows columns have different lengths {sizes}; give one entry per row in each")
        for begin, end in (("q_begin", "q_end"), ("k_begin", "k_end")):
            wrong = np.flatnonzero((getattr(self, begin) < 0) | (getattr(self, end) < getattr(self, begin)))
            if len(wrong):
                i = int(wrong[0])
                raise UserError(
                    f"TaskRows row {i} has {begin}={getattr(self, begin)[i]}, {end}={getattr(self, end)[i]}; "
                    f"give 0 <= {begin} <= {end}"
                )

    def __len__(self) -> int:
        return len(self.q_begin)

    @property
    def q_len(self) -> np.ndarray:
        return self.q_end - self.q_begin

    @property
    def k_len(self) -> np.ndarray:
        return self.k_end - self.k_begin

    def take(self, index: np.ndarray) -> TaskRows:
        """Select tasks by `index`, numbers or a boolean mask."""
        return TaskRows(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def aligned(cls, q_begin: Any, q_end: Any, k_begin: Any, k_end: Any) -> TaskRows:
        """Return causal tasks whose queries align with the end of their keys."""
        q_begin, q_end, k_begin, k_end = (np.asarray(c, dtype=np.int64) for c in (q_begin, q_end, k_begin, k_end))
        return cls(q_begin, q_end, k_begin, k_end, (k_end - k_begin) - (q_end - q_begin))

    @classmethod
    def documents(cls, lengths: Any) -> TaskRows:
        """Return tasks for causal attention inside packed documents."""
        end = np.cumsum(np.asarray(lengths, dtype=np.int64))
        begin = end - np.asarray(lengths, dtype=np.int64)
        return cls.aligned(begin, end, begin, end)


Results = tuple[Tensor, Tensor]            # out and lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


class BackwardInputs(NamedTuple):
    """Inputs of backward in the packed buffers; out and lse are merged over all tasks of a query."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """A way to compute attention tasks. `prepare` runs once per plan, so that layers only compute."""

    @property
    def name(self) -> str: ...

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        """Return None if this kernel fits, else the reason and a remedy; value_dim defaults to head_dim."""
        ...

    def prepare(self, tasks: TaskRows, device: torch.device, scores: Scores = PLAIN) -> Any:
        """Return an opaque object with all data that depends on the tasks, the window and the softcap.

        It does not depend on the scale, which may differ between layers of a plan and is passed to each call.
        """
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float | None = None) -> Results:
        """q [num_q, heads, dim], k [num_k, kv_heads, dim], v [num_k, kv_heads, value_dim] ->
        out [num_q, heads, value_dim], lse [num_q, heads].

        lse is natural, float32 (float64 for float64). Queries that see no key: out 0, lse -inf.
        """
        ...

    def backward(self, inputs: BackwardInputs, prepared: Any, scale: float | None = None) -> Gradients:
        """Return dq, dk, dv from the merged out and lse; zeros for tokens in no task."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over tasks and of log-sum-exps."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Results:
    """Merge the attention over two sets of keys into the attention over both: out [..., dim], lse [...].

    Exact even if one side saw no key (lse -inf, out 0). Sums are in lse's dtype, the result in out_a's.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be nan; both weights are 0 there
    weight_a, weight_b = torch.exp(lse_a - finite)[..., None], torch.exp(lse_b - finite)[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def cap_slope(capped_scores: Tensor, softcap: float | None) -> Tensor | float:
    """Return the derivative of the capped score with respect to the score."""
    return 1.0 if softcap is None else 1 - (capped_scores / softcap).square()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Results:
    """Merge sinks [heads] into out [tokens, heads, dim] and lse [tokens, heads] over all keys."""
    return merge(out, lse, out.new_zeros(()), sinks.to(lse.dtype))


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [heads], given with_sinks' out and lse: the sum over tokens of -delta times probability."""
    probability = torch.exp(sinks.to(lse.dtype) - lse.masked_fill(lse == -torch.inf, 0.0))  # [tokens, heads]
    delta = (dout.to(lse.dtype) * out).sum(dim=-1)
    return -(probability * delta).sum(dim=0).to(sinks.dtype)


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != q.shape[1:2] or not sinks.dtype.is_floating_point:
        raise UserError(f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; give one floating-point "
                        f"number for each of the {q.shape[1]} query heads")
    if sinks.device != q.device:
        raise UserError(f"sinks is on {sinks.device} and q on {q.device}; move them to one device")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise if the tensors' shapes, dtypes or devices do not match."""
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise UserError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "give q [tokens, heads, dim], k [tokens, kv_heads, dim], v [tokens, kv_heads, value_dim]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(
            f"q has {q.shape[1]} heads and k, v have {k.shape[1]}; give a number of heads that kv_heads divides"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; convert them to one dtype")
    if not q.device == k.device == v.device:
        raise UserError(f"q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, tasks: TaskRows) -> None:
    """Raise if tensors do not match, or if tasks exceed them."""
    check_tensors(q, k, v)
    for end, column, tensor, name in (("q_end", tasks.q_end, q, "q"), ("k_end", tasks.k_end, k, "k")):
        if len(column) and column.max() > tensor.shape[0]:
            raise UserError(
                f"TaskRows row {int(column.argmax())} has {end}={column.max()} but {name} holds {tensor.shape[0]} "
                "tokens; give the rows of these buffers"
            )


def dims_text(head_dim: int, value_dim: int | None) -> str:
    """Return the text that messages use for head dims."""
    return f"head_dim is {head_dim}" + ("" if value_dim in (None, head_dim) else f" and that of values {value_dim}")


def one_dim_only(head_dim: int, value_dim: int | None) -> str | None:
    """Return why a kernel with one head dim for keys and values does not fit, or None."""
    if value_dim in (None, head_dim):
        return None
    return f"{dims_text(head_dim, value_dim)}, it takes one for both; use kernel='hopper', 'sdpa' or 'dense'"


def check_one_dim(name: str, k: Tensor, v: Tensor) -> None:
    reason = one_dim_only(k.shape[-1], v.shape[-1])
    if reason is not None:
        raise UserError(f"kernel={name!r}: {reason}")


def no_softcap(scores: Scores) -> str | None:
    """Return why a kernel without softcap does not fit, or None."""
    if scores.softcap is None:
        return None
    return f"softcap is {scores.softcap}, it takes None; use kernel='hopper' or 'fa4' on a GPU, or 'sdpa' anywhere"


def visible(tasks: TaskRows, window: int | None = None) -> TaskRows:
    """Trim queries that see no key and keys that no query sees, and drop empty tasks; the pairs stay the same."""
    skipped = np.maximum(0, -tasks.q_offset)
    q_offset, q_begin, q_end = tasks.q_offset + skipped, tasks.q_begin + skipped, tasks.q_end
    first_key = np.zeros_like(q_offset)
    if window is not None:
        q_end = np.minimum(q_end, q_begin + tasks.k_len + window - 1 - q_offset)
        first_key = np.maximum(0, q_offset - window + 1)
    last_key = np.minimum(tasks.k_len, q_offset + q_end - q_begin)
    keep = (q_begin < q_end) & (first_key < last_key)
    k_begin, k_end = tasks.k_begin + first_key, tasks.k_begin + last_key
    return TaskRows(*(column[keep] for column in (q_begin, q_end, k_begin, k_end, q_offset - first_key)))


def joined(tasks: TaskRows, window: int | None = None) -> TaskRows:
    """Join tasks with adjacent queries if they have the same keys or continue one causal task; pairs stay the same.

    Slices of a band against the same keys become one rectangle, and shards that were cut at the end of a slice become
    one shard again, so that shared keys are read and written once.
    """
    order = np.lexsort((tasks.q_begin, tasks.k_begin))
    tasks = tasks.take(order)
    if len(tasks) < 2:
        return tasks
    first, second = tasks.take(np.arange(len(tasks) - 1)), tasks.take(np.arange(1, len(tasks)))
    follows = (second.q_begin == first.q_end) & (second.k_begin == first.k_begin)
    full = (first.q_offset >= first.k_len - 1) & (second.q_offset >= second.k_len - 1) & (second.k_len == first.k_len)
    if window is not None:
        full &= second.q_offset == first.q_offset + first.q_len
    causal = ((first.q_offset + first.q_len == first.k_len) & (second.q_offset == first.k_len)
              & (second.q_offset + second.q_len == second.k_len))
    opens = np.append(True, ~(follows & (full | causal)))
    begin = np.flatnonzero(opens)
    last = np.append(begin[1:] - 1, len(tasks) - 1)
    return replace(tasks.take(begin), q_end=tasks.q_end[last], k_end=tasks.k_end[last])


def causal_and_full(tasks: TaskRows) -> tuple[TaskRows, TaskRows]:
    """Split visible tasks into causal tasks aligned with the end of their keys, and tasks whose queries see all keys.

    A task whose queries extend past its keys is cut in two; a query that was in one task is still in one task.
    """
    diagonal = tasks.q_offset < tasks.k_len - 1
    crossing = tasks.take(diagonal)
    q_cut = np.minimum(crossing.q_end, crossing.q_begin + crossing.k_len - crossing.q_offset)
    past = q_cut < crossing.q_end
    tail = replace(crossing, q_begin=q_cut, q_offset=crossing.k_len)
    return replace(crossing, q_end=q_cut), concatenate(tasks.take(~diagonal), tail.take(past))


def rectangles_and_squares(causal: TaskRows) -> tuple[TaskRows, TaskRows]:
    """Split causal tasks aligned at the end into full rectangles before the diagonal and squares on it."""
    before = causal.q_offset > 0
    rectangles = replace(causal, k_end=causal.k_begin + causal.q_offset).take(before)
    squares = replace(causal, k_begin=causal.k_begin + causal.q_offset, q_offset=np.zeros_like(causal.q_offset))
    return rectangles, squares


def unit_stride(x: Tensor) -> Tensor:
    """Return x, copied if the last dimension is not contiguous, as fused kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def concatenate(*tables: TaskRows) -> TaskRows:
    return TaskRows(*(np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(TaskRows)))
