"""Variable-length chunks: documents dealt over replicas and micro-batches so that work is equal, tokens are not.

The work of a document is quadratic in its length plus linear: its attention and its linear layers. Chunks with long
documents get fewer tokens, chunks without get more, as many as memory allows. A document is never cut, so a chunk's
work is at least that of its longest document, and the tokens of the others grow until they fill the memory. Inside a
chunk's group every document is cut over all ranks.

Documents go heaviest first to the chunk with the least work that has the tokens to spare; then single documents move
off the heaviest chunk, or change places with a lighter one elsewhere, for as long as that lowers the heaviest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.baselines.groups import step_of_groups
from distca.baselines.per_document_cp import head_tail_layout
from distca.planning.step import StepPlan
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.layout import Layout, layout_from_slices

_ROUNDS = 200
_LEVEL = 1e-3  # a heaviest chunk so little above the mean is left alone


def variable_length_step(
    lengths: np.ndarray, chunk: np.ndarray, model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    cp: int = 1,
) -> StepPlan:
    """A step whose `chunk`s, as `variable_length` deals them, are rows of one micro-batch after the other."""
    return step_of_groups(variable_rows(lengths, chunk, num_data // cp), head_tail_layout, model, cp=cp, layers=layers,
                          tp=tp)


def variable_rows(lengths: np.ndarray, chunk: np.ndarray, replicas: int) -> list[Layout]:
    """Chunk c is replica c % replicas' row in micro-batch c // replicas; a micro-batch without documents is none."""
    rows = []
    for micro_batch in np.unique(chunk // replicas).tolist():
        mine = np.flatnonzero(chunk // replicas == micro_batch)
        own = lengths[mine]
        rows.append(layout_from_slices(own, np.arange(len(own)), np.zeros_like(own), own, chunk[mine] % replicas,
                                       replicas))
    return rows


def variable_length(lengths: np.ndarray, work: np.ndarray, *, num_chunks: int, max_tokens: int) -> np.ndarray | None:
    """The chunk of every document, or None where documents do not fit `num_chunks` chunks of `max_tokens` tokens."""
    if num_chunks < 1 or max_tokens < 1:
        raise UserError(f"num_chunks is {num_chunks} and max_tokens {max_tokens}; give at least 1 of each")
    if len(work) != len(lengths):
        raise UserError(f"work has {len(work)} entries but there are {len(lengths)} documents; give one for each")
    chunk = np.full(len(lengths), -1)
    load, free = np.zeros(num_chunks), np.full(num_chunks, max_tokens, dtype=np.int64)
    for document in np.argsort(-work, kind="stable").tolist():
        fits = np.where(free >= lengths[document], load, np.inf)
        target = int(fits.argmin())
        if fits[target] == np.inf:
            return None
        chunk[document] = target
        load[target] += work[document]
        free[target] -= lengths[document]
    _improve(chunk, lengths, work, load, free)
    return chunk


def _improve(chunk: np.ndarray, lengths: np.ndarray, work: np.ndarray, load: np.ndarray, free: np.ndarray) -> None:
    """Lower the heaviest chunk by one move or one swap at a time."""
    for _ in range(_ROUNDS):
        heavy = int(load.argmax())
        if load[heavy] <= (1.0 + _LEVEL) * load.mean():
            return
        lightest = np.argsort(load, kind="stable")[:-1].tolist()
        if not any(_shift(chunk, lengths, work, load, free, heavy, light) for light in lightest):
            return


def _shift(chunk: np.ndarray, lengths: np.ndarray, work: np.ndarray, load: np.ndarray, free: np.ndarray, heavy: int,
           light: int) -> bool:
    """Move one document to the lighter chunk, for nothing or for one of its own, where both stay below the heavier."""
    mine, other = np.flatnonzero(chunk == heavy), np.flatnonzero(chunk == light)
    gap = load[heavy] - load[light]
    moved = work[mine][:, None] - np.concatenate([[0.0], work[other]])  # [mine, nothing or one of other]
    tokens = lengths[mine][:, None] - np.concatenate([[0], lengths[other]])
    least = 1e-6 * load[heavy]
    allowed = (moved > least) & (moved < gap - least) & (tokens <= free[light]) & (-tokens <= free[heavy])
    if not allowed.any():
        return False
    best = np.where(allowed, np.abs(moved - gap / 2), np.inf)
    i, j = np.unravel_index(int(best.argmin()), best.shape)
    chunk[mine[i]] = light
    if j > 0:
        chunk[other[j - 1]] = heavy
    load[heavy] -= moved[i, j]
    load[light] += moved[i, j]
    free[heavy] += tokens[i, j]
    free[light] -= tokens[i, j]
    return True
