"""How far attention in low precision may be from its formula, by rounding analysis and not by another run's error.

What one machine's arithmetic gives says nothing about the next one's: order of summation, fused products and the
library's exp all differ. What holds everywhere follows from the inputs. Two kinds of rounding occur.

Sums, scores and exponents are kept in float32 (float64 for float64). n terms summed in any order, each step rounded or
truncated by at most a = eps, are off by at most gamma(n) = n a / (1 - n a) times the sum of their magnitudes, and where
signs are random practically never by more than 8 sqrt(n) a times it (Higham and Mary 2019). A score that is off by e
changes its probability by a factor of at most exp(e); a softcap, whose slope is at most 1, makes e no larger.

Probabilities, score gradients, outs of parts and results are rounded to the tensors' dtype, each by at most u = eps / 2
of itself. Their sum is at most the sum of the bounds. It is also, for inputs drawn independently with mean 0, a sum of
independent errors, which exceeds 8 times the root of the bounds' squares with a probability below 1e-13 (Hoeffding).
The smaller of the two holds for every element; the root mean square of many elements stays below the root itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.kernels.dense import times_shown
from distca.kernels.interface import TaskRows, accumulation_dtype, cap_slope, capped, softmax_scale

NAMES = ("out", "lse", "dq", "dk", "dv")
LIKELY = 8.0  # standard deviations
EXP_ULP = 20  # torch's exp_u20
FAST_TANH = 2.0**-11  # of itself: PTX's tanh.approx.f32, which 16-bit kernels on GPUs use
CUBIC_EXP = 2.0**-13  # torch's fexp_u20, which CPUs use for 16-bit tensors: a cubic that is off by up to 6e-5
MANY = 1024  # elements, over which squares average
SCORES_AT_ONCE = {"cpu": 2**18, "cuda": 2**26}  # on a CPU what its cache holds


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor in float64, and how far from it a kernel may be."""

    name: str
    value: torch.Tensor
    bound: torch.Tensor    # of each element
    typical: torch.Tensor  # whose root mean square bounds that of many elements

    def at(self, tokens: torch.Tensor) -> Expected:
        """For these tokens alone."""
        return Expected(self.name, self.value[tokens], self.bound[tokens], self.typical[tokens])

    def check(self, actual: torch.Tensor) -> None:
        """Raise AssertionError where `actual` is farther off; what is not finite must be exact."""
        assert actual.shape == self.value.shape, f"{self.name} has shape {tuple(actual.shape)}"
        finite = self.value.isfinite()
        assert torch.equal(actual.isfinite(), finite) and torch.equal(actual[~finite].double(), self.value[~finite]), (
            f"{self.name} is not finite where it should be")
        error = (actual.double() - self.value)[finite].abs()
        if error.numel() == 0:
            return
        bound = self.bound[finite]
        at = (error - bound).argmax()
        assert error[at] <= bound[at], (
            f"{self.name}: an element is off by {error[at]:.3e}, rounding allows {bound[at]:.3e}")
        rms, typical = (x.square().mean().sqrt().item() for x in (error, self.typical[finite]))
        assert error.numel() < MANY or rms <= typical, (
            f"{self.name}: the root mean square error is {rms:.3e}, rounding allows {typical:.3e}")


def expected_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, rows: TaskRows, *,
    window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> list[Expected]:
    """out, lse, dq, dk, dv of these tensors, with the bounds of their dtype; one KV head and a few queries at a time.

    However the keys of a query and the queries of a key are divided among rows and servers, the bounds are the same.
    """
    scale, precision = softmax_scale(q, scale), _Precision.of(q)
    wide_q, wide_k, wide_v, wide_dout = (x.double() for x in (q, k, v, dout))
    total = {name: _Sums.zeros(like) for name, like in zip(NAMES, (dout, q[..., 0], q, k, v), strict=True)}
    num_queries = (_queries_of_keys(rows, len(k)) * (q.shape[1] // k.shape[1])).to(q.device)
    for queries, heads, head in _pieces(q, k):
        here = rows_of_queries(rows, queries.start, queries.stop)
        count = times_shown(wide_q[queries], wide_k, here, window)
        out, lse, dq, dk, dv = _piece(
            wide_q[queries, heads].transpose(0, 1), wide_k[:, head], wide_v[:, head],
            wide_dout[queries, heads].transpose(0, 1), count, num_queries, (scale, softcap), precision)
        for name, sums in (("out", out), ("lse", lse), ("dq", dq)):
            total[name].put((queries, heads), sums.transposed())
        for name, sums in (("dk", dk), ("dv", dv)):
            total[name].add((slice(None), head), sums)
    return [total[name].expected(name, precision) for name in NAMES]


def check_attention(
    actual: Sequence[torch.Tensor | None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
    rows: TaskRows, *, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> None:
    """Raise AssertionError where out, lse, dq, dk or dv is farther from the formula than rounding explains."""
    check_each(expected_attention(q, k, v, dout, rows, window=window, scale=scale, softcap=softcap), actual, q.dtype)


def check_each(everything: Sequence[Expected], actual: Sequence[torch.Tensor | None], dtype: torch.dtype) -> None:
    for expected, x in zip(everything, actual, strict=True):
        if x is not None:
            assert expected.name == "lse" or x.dtype == dtype, f"{expected.name} is {x.dtype}"
            expected.check(x)


@dataclass(frozen=True, slots=True)
class _Precision:
    sum_eps: float    # of what sums are kept in
    unit: float       # half the eps of the tensors' dtype
    least: float      # half of its smallest number
    exp: float        # how far exp may be off, of itself
    tanh: float       # and tanh
    runs: int         # that round like this: in float64 the oracle does too

    @classmethod
    def of(cls, x: torch.Tensor) -> _Precision:
        about, sum_eps = torch.finfo(x.dtype), torch.finfo(accumulation_dtype(x.dtype)).eps
        short, cpu = x.dtype.itemsize == 2, x.device.type == "cpu"
        return cls(sum_eps, about.eps / 2, about.smallest_normal * about.eps / 2,
                   CUBIC_EXP if short and cpu else EXP_ULP * sum_eps,
                   FAST_TANH if short and not cpu else EXP_ULP * sum_eps, 2 if x.dtype == torch.float64 else 1)

    def gamma(self, num_terms: torch.Tensor | int) -> torch.Tensor:
        terms = torch.as_tensor(num_terms, dtype=torch.float64)
        return torch.minimum(terms * self.sum_eps / (1 - terms * self.sum_eps).clamp(min=0.5),
                             LIKELY * terms.sqrt() * self.sum_eps)


@dataclass(frozen=True, slots=True)
class _Sums:
    """A value with what bounds its error: of sums, and of roundings to the dtype, at worst and squared."""

    value: torch.Tensor
    summed: torch.Tensor
    worst: torch.Tensor
    squared: torch.Tensor

    @classmethod
    def zeros(cls, like: torch.Tensor) -> _Sums:
        return cls(*(torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(4)))

    def fields(self) -> tuple[torch.Tensor, ...]:
        return self.value, self.summed, self.worst, self.squared

    def transposed(self) -> _Sums:
        return _Sums(*(x.transpose(0, 1) for x in self.fields()))

    def put(self, where: tuple[slice, slice | int], other: _Sums) -> None:
        for mine, theirs in zip(self.fields(), other.fields(), strict=True):
            mine[where] = theirs

    def add(self, where: tuple[slice, slice | int], other: _Sums) -> None:
        for mine, theirs in zip(self.fields(), other.fields(), strict=True):
            mine[where] += theirs

    def expected(self, name: str, precision: _Precision) -> Expected:
        result = 0.0 if name == "lse" else precision.unit * self.value.abs() + precision.least
        likely = (self.squared + result**2).sqrt()
        bound = self.summed + torch.minimum(self.worst + result, LIKELY * likely)
        return Expected(name, self.value, precision.runs * bound, precision.runs * (self.summed + likely))


def _piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, count: torch.Tensor,
    num_queries: torch.Tensor, scaling: tuple[float, float | None], precision: _Precision,
) -> tuple[_Sums, ...]:
    """q, dout [heads, q, dim] of a KV head k, v [k, dim]; count [q, k] -> out, lse, dq [heads, q, …], dk, dv [k, dim].

    p are probabilities, s scores, dp and ds their gradients, delta is dout · out; names ending in _off bound an error.
    num_queries [k, 1] is how many terms a key's gradient is summed of, those of other pieces among them. scaling is
    the scale and the softcap, whose slope is bend.
    """
    eps, unit, gamma = precision.sum_eps, precision.unit, precision.gamma
    dim, value_dim, seen = q.shape[-1], v.shape[-1], (count > 0).double()
    num_keys = count.sum(dim=1, keepdim=True)                                         # [q, 1]
    scale, softcap = scaling
    capped_s = capped(scale * q @ k.T, softcap)
    bend = cap_slope(capped_s, softcap)
    s = capped_s + count.log()
    lse = s.logsumexp(dim=-1, keepdim=True)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0))
    size = torch.where(seen > 0, s, 0.0).abs()
    largest = size.amax(dim=-1, keepdim=True) if size.numel() else torch.zeros_like(lse)

    product_off = gamma(dim + 2) * scale * q.abs() @ k.abs().T
    score_off = product_off + 4 * eps * (size + largest) + precision.exp
    bend_off: torch.Tensor | float = 0.0
    if softcap is not None:
        size_capped = capped_s.abs()
        score_off = score_off + (precision.tanh + 4 * eps) * size_capped
        bend_off = 2 * size_capped / softcap**2 * (product_off + (precision.tanh + 4 * eps) * size_capped) + 4 * eps
    lse_off = (p * score_off).sum(-1, keepdim=True) + gamma(num_keys) + 16 * eps * (largest + num_keys.log1p() + 1)
    p_turn = torch.expm1(score_off + lse_off)                                         # of p's share

    out = p @ v
    out_summed = (p * (p_turn + gamma(num_keys)) + precision.least * seen) @ v.abs()
    out_worst = unit * 2 * p @ v.abs()                                                # p, and the out of every part
    out_squared = unit**2 * 2 * p.square() @ v.square()

    dp = dout @ v.T
    delta = (dout * out).sum(-1, keepdim=True)
    delta_summed = (p * p_turn * dp.abs()).sum(-1, keepdim=True) + (dout.abs() * (
        gamma(value_dim + 1) * out.abs() + gamma(num_keys) * (p @ v.abs()) + precision.least * (seen @ v.abs() + 1)
    )).sum(-1, keepdim=True)
    delta_worst = (dout.abs() * (out_worst + unit * out.abs())).sum(-1, keepdim=True)
    delta_squared = unit**2 * (2 * (p * dp).square().sum(-1, keepdim=True)
                               + (dout * out).square().sum(-1, keepdim=True))
    slope = scale * bend * p                                                          # of ds, with dp - delta
    ds = slope * (dp - delta)
    ds_summed = slope * (p_turn * (dp - delta).abs() + gamma(value_dim + 1) * dout.abs() @ v.abs().T + delta_summed
                         + 4 * eps * (dp.abs() + delta.abs())) + precision.least * seen
    ds_summed = ds_summed + scale * bend_off * p * (dp - delta).abs()

    dq_summed = (ds_summed + gamma(num_keys) * ds.abs()) @ k.abs()
    dq_worst = unit * 3 * ds.abs() @ k.abs() + (slope @ k).abs() * delta_worst        # p, ds and the dq of every part
    dq_squared = unit**2 * 5 * ds.square() @ k.square() + (slope @ k).square() * delta_squared

    columns = [x.flatten(0, 1) for x in (p, p_turn, slope, ds, ds_summed, q, dout, delta_worst, delta_squared)]
    p, p_turn, slope, ds, ds_summed, q, dout, delta_worst, delta_squared = columns    # [heads * q, …]
    dk_summed = ds_summed.T @ q.abs() + gamma(num_queries) * (ds.abs().T @ q.abs())
    dk_worst = unit * 4 * ds.abs().T @ q.abs() + slope.T @ (q.abs() * delta_worst)    # and the dk of every head
    dk_squared = unit**2 * 6 * ds.square().T @ q.square() + slope.square().T @ (q.square() * delta_squared)
    dv_summed = (p * p_turn).T @ dout.abs() + gamma(num_queries) * (p.T @ dout.abs()) + precision.least * (
        seen.T @ dout.abs().unflatten(0, (-1, len(seen))).sum(0))
    dv_worst = unit * 3 * p.T @ dout.abs()
    dv_squared = unit**2 * 3 * p.square().T @ dout.square()
    nothing = torch.zeros_like(lse[..., 0])
    return (_Sums(out, out_summed, out_worst, out_squared), _Sums(lse[..., 0], lse_off[..., 0], nothing, nothing),
            _Sums(ds.unflatten(0, lse.shape[:2]) @ k, dq_summed, dq_worst, dq_squared),
            _Sums(ds.T @ q, dk_summed, dk_worst, dk_squared), _Sums(p.T @ dout, dv_summed, dv_worst, dv_squared))


def _pieces(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Queries, their heads and the KV head of one piece."""
    group = q.shape[1] // k.shape[1]
    at_once = max(1, SCORES_AT_ONCE[q.device.type] // (group * max(1, k.shape[0])))
    for head in range(k.shape[1]):
        for begin in range(0, q.shape[0], at_once):
            yield slice(begin, min(begin + at_once, q.shape[0])), slice(head * group, (head + 1) * group), head


def _queries_of_keys(rows: TaskRows, num_keys: int) -> torch.Tensor:
    """[k, 1] queries in the rows that a key stands in."""
    change = np.zeros(num_keys + 1, dtype=np.int64)
    np.add.at(change, rows.k_begin, rows.q_len)
    np.add.at(change, rows.k_end, -rows.q_len)
    return torch.from_numpy(np.cumsum(change)[:-1, None].astype(np.float64))


def rows_of_queries(rows: TaskRows, begin: int, end: int) -> TaskRows:
    """The rows over a buffer that holds the queries from begin to end alone."""
    q_begin, q_end = np.clip(rows.q_begin, begin, end), np.clip(rows.q_end, begin, end)
    return replace(rows, q_begin=q_begin - begin, q_end=q_end - begin, q_offset=rows.q_offset + q_begin - rows.q_begin)
