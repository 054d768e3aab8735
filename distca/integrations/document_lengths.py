"""Read a rank's slices of documents out of what trainers hand to attention.

Attention that is cut by document needs nothing but where slices begin in their documents and how long they are; how a
batch tells that differs. Cumulative lengths and positions are the two conventions in use, and rows with padding are
still common where batches are small. Nothing is judged here that other ranks may explain: see `spanning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class RowSlices(NamedTuple):
    """A rank's slices of documents, in the order of its tokens."""

    start: tuple[int, ...]                   # position of each slice's first token in its document
    length: tuple[int, ...]
    document: tuple[int, ...] | None = None  # a number that slices of one document share over all ranks


def whole_documents(lengths: Sequence[int]) -> RowSlices:
    return RowSlices((0,) * len(lengths), tuple(lengths))


def from_cumulative(edges: torch.Tensor, num_tokens: int, field: str = "cumulative lengths") -> list[int]:
    """Lengths of the documents between neighbouring edges, without empty ones; `field` names them in errors."""
    at = edges.cpu().numpy().reshape(-1)
    lengths = np.diff(at)
    if len(at) < 1 or at[0] != 0 or at[-1] != num_tokens or (lengths < 0).any():
        shown = ", ".join(str(edge) for edge in at[:8]) + (", …" if len(at) > 8 else "")
        raise ValueError(f"{field} is [{shown}] for {num_tokens} tokens; give rising numbers from 0 to the number of "
                         "tokens, padding included")
    return lengths[lengths > 0].tolist()


def from_positions(position_ids: torch.Tensor, document_ids: torch.Tensor | None = None) -> RowSlices:
    """Slices of rows laid end to end, by the positions of their tokens: [tokens] or [rows, tokens]."""
    position = _numbers(position_ids, "position_ids")
    document = None if document_ids is None else _numbers(document_ids, "document_ids")
    return _slices(position, _begins(position, document), document)


def from_batch(
    position_ids: torch.Tensor | None, cu_seq_lens: torch.Tensor | None, padding: torch.Tensor | None,
    batch: int, row_len: int, document_ids: torch.Tensor | None = None,
) -> tuple[RowSlices, np.ndarray | None]:
    """Slices of the documents of `batch` rows laid end to end, and which tokens they are (None: all).

    Slices begin at each row and wherever positions do not go up by one, or where cu_seq_lens says. `padding`
    [batch, row_len] is true for tokens that count; the others belong to no document. `document_ids` [batch, row_len]
    say which slices of all ranks are one document, where that is not the order of ranks.
    """
    real = None if padding is None else padding.cpu().numpy().astype(bool)
    if real is not None and real.all():
        real = None
    if cu_seq_lens is not None:
        if real is not None:
            raise ValueError("cu_seq_lens_q came with an attention_mask that has padding; give one of them")
        return _with_edges(from_cumulative(cu_seq_lens, batch * row_len, "cu_seq_lens_q"), position_ids), None
    if position_ids is None or position_ids.ndim != 2:
        found = "none" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
        raise ValueError(f"attention got {found}, so documents cannot be told apart; give cu_seq_lens_q, or "
                         "position_ids [rows, tokens] to a model that hands them to its attention")
    position = np.broadcast_to(position_ids.cpu().numpy(), (batch, row_len))
    document = None if document_ids is None else np.broadcast_to(
        _numbers(document_ids, "document_ids"), (batch, row_len))
    begins = _begins(position, document)
    if real is None:
        return _slices(position, begins, document), None
    inside = np.zeros_like(real)
    inside[:, 1:] = real[:, 1:] & real[:, :-1]                   # tokens that follow another real token
    if (real.sum(axis=1) > inside.sum(axis=1) + 1).any():
        raise ValueError("attention_mask has padding between the tokens of a row; pad at one end, or pack documents "
                         "with position_ids that restart")
    kept = np.flatnonzero(real.reshape(-1))
    columns = (_behind_padding(position, real), begins | ~inside, document)
    return _slices(*(None if x is None else x.reshape(-1)[kept] for x in columns)), kept


def _numbers(tensor: torch.Tensor, field: str) -> np.ndarray:
    if tensor.ndim not in (1, 2) or tensor.dtype.is_floating_point:
        raise ValueError(f"{field} has shape {tuple(tensor.shape)} and {tensor.dtype}; give whole numbers [tokens] or "
                         "[rows, tokens]")
    found = tensor.cpu().numpy()
    return found if tensor.ndim == 2 else found[None]


def _begins(position: np.ndarray, document: np.ndarray | None) -> np.ndarray:
    """[rows, tokens] Where a slice begins: a row, a position that is not the next one, another document."""
    begins = np.ones(position.shape, dtype=bool)
    begins[:, 1:] = np.diff(position, axis=1) != 1
    if document is not None:
        begins[:, 1:] |= np.diff(document, axis=1) != 0
    return begins


def _behind_padding(position: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Positions of tokens behind padding whose positions count that padding from 0: these begin a document."""
    padded = real.argmax(axis=1)                                 # [rows] tokens of padding before the first real one
    counted = (position[:, 0] == 0) & ~real[:, 0] & (np.take_along_axis(position, padded[:, None], 1)[:, 0] == padded)
    return position - np.where(counted, padded, 0)[:, None]


def _slices(position: np.ndarray | None, begins: np.ndarray | None, document: np.ndarray | None) -> RowSlices:
    assert position is not None and begins is not None
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, begins.size))
    return RowSlices(tuple(position.reshape(-1)[first].tolist()), tuple(length.tolist()),
                     None if document is None else tuple(document.reshape(-1)[first].tolist()))


def _with_edges(lengths: list[int], position_ids: torch.Tensor | None) -> RowSlices:
    """Cumulative lengths cut documents; positions add only that the first of them is a later part of one.

    Positions that begin with 0 may as well count all tokens, as models number them that are given none.
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.numel() != sum(lengths) or not lengths:
        return whole_documents(lengths)
    position = position_ids.cpu().numpy().reshape(-1)
    if position[0] == 0:
        return whole_documents(lengths)
    begins = _begins(position[None], None)[0]
    begins[np.cumsum([0, *lengths[:-1]])] = True
    return _slices(position, begins, None)
