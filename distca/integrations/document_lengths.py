"""Read a rank's slices of documents out of what trainers hand to attention.

Attention that is cut by document needs nothing but where slices begin in their documents and how long they are; how a
batch tells that differs. Cumulative lengths and positions are the two conventions in use, and rows with padding are
still common where batches are small. Where a batch says it twice, both must say the same: cumulative lengths cut
documents, and positions or numbers of documents that begin one elsewhere are refused. Nothing is judged here that other
ranks may explain: see `spanning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.validation import UserError

DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "document_ids", "seq_idx")
_OF_OTHERS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens", "packed_seq_params",
              "document_id", "segment_ids", "sequence_ids")      # arguments that Transformers would pass on unread


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
        raise UserError(f"{field} is [{shown}] for {num_tokens} tokens; give rising numbers from 0 to the number of "
                        "tokens, padding included")
    return lengths[lengths > 0].tolist()


def check_keys(edges: torch.Tensor, key_edges: torch.Tensor | None) -> None:
    """Refuse keys that are cut into other documents than queries."""
    if key_edges is not None and key_edges is not edges and (
            key_edges.shape != edges.shape or bool((key_edges != edges).any())):
        raise UserError("cumulative lengths of keys differ from those of queries; distca serves self-attention, where "
                        "both are the same tokens")


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
            raise UserError("cu_seq_lens_q came with an attention_mask that has padding; give one of them")
        return from_edges(cu_seq_lens, (batch, row_len), position_ids, document_ids, "cu_seq_lens_q"), None
    if position_ids is None or position_ids.ndim != 2:
        found = "none" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
        raise UserError(f"attention got {found}, so documents cannot be told apart; give cu_seq_lens_q, or "
                        "position_ids [rows, tokens] to a model that hands them to its attention")
    position = _numbers(position_ids, "position_ids", (batch, row_len))
    document = None if document_ids is None else _numbers(document_ids, "document_ids", (batch, row_len))
    begins = _begins(position, document)
    if real is None:
        return _slices(position, begins, document), None
    inside = np.zeros_like(real)
    inside[:, 1:] = real[:, 1:] & real[:, :-1]                   # tokens that follow another real token
    if (real.sum(axis=1) > inside.sum(axis=1) + 1).any():
        raise UserError("attention_mask has padding between the tokens of a row; pad at one end, or pack documents "
                        "with position_ids that restart")
    kept = np.flatnonzero(real.reshape(-1))
    columns = (_behind_padding(position, real), begins | ~inside, document)
    return _slices(*(None if x is None else x.reshape(-1)[kept] for x in columns)), kept


def from_arguments(
    named: Mapping[str, Any], padding: torch.Tensor | None, batch: int, row_len: int
) -> tuple[RowSlices, np.ndarray | None]:
    """`from_batch` of what Transformers hands to its attention; all that says where documents begin must agree."""
    for name in _OF_OTHERS:
        if named.get(name) is not None:
            raise UserError(f"attention got {name}, which nothing here reads; say where documents begin by "
                            "cu_seq_lens_q, or by position_ids that restart and document_ids")
    edges, key_edges = named.get("cu_seq_lens_q"), named.get("cu_seq_lens_k")
    if edges is None and key_edges is not None:
        raise UserError("cu_seq_lens_k came without cu_seq_lens_q; give both")
    if edges is not None:
        check_keys(edges, key_edges)
    found = from_batch(named.get("position_ids"), edges, padding, batch, row_len, named.get("document_ids"))
    slices, kept = found
    for name in ("max_length_q", "max_length_k"):
        if named.get(name) is not None and slices.length and int(named[name]) < max(slices.length):
            raise UserError(f"{name} is {int(named[name])} but a document has {max(slices.length)} tokens; give the "
                            "longest one's, or leave it out")
    if named.get("seq_idx") is not None:
        number = _numbers(named["seq_idx"], "seq_idx", (batch, row_len)).reshape(-1)
        at = np.arange(batch * row_len) if kept is None else kept
        cut = np.zeros(len(at), dtype=bool)
        cut[np.cumsum((0, *slices.length[:-1]))[:len(slices.length)]] = True
        wrong = np.flatnonzero((np.diff(number[at]) != 0) != cut[1:])
        wrong = wrong[at[wrong + 1] % row_len != 0]              # rows begin one in any case
        if len(wrong):
            raise UserError(f"seq_idx goes from {number[at[wrong[0]]]} to {number[at[wrong[0] + 1]]} at token "
                            f"{at[wrong[0] + 1]}, which is not where position_ids or cu_seq_lens_q begin documents; "
                            "let them say the same, or leave it out")
    return found


def _numbers(tensor: torch.Tensor, field: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """[rows, tokens] on the host; one row stands for all rows of a `shape`."""
    if tensor.ndim not in (1, 2) or tensor.dtype.is_floating_point:
        raise UserError(f"{field} has shape {tuple(tensor.shape)} and {tensor.dtype}; give whole numbers [tokens] or "
                        "[rows, tokens]")
    found = tensor.cpu().numpy()
    found = found if tensor.ndim == 2 else found[None]
    if shape is not None and found.shape not in (shape, (1, shape[1])):
        raise UserError(f"{field} has shape {tuple(tensor.shape)} for tokens of shape {shape}; give a number for each")
    return found if shape is None else np.broadcast_to(found, shape)


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


def from_edges(
    edges: torch.Tensor, shape: tuple[int, int], position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None, field: str = "cumulative lengths",
) -> RowSlices:
    """Slices between neighbouring edges of [rows, tokens] laid end to end; positions say which continue a document.

    Rows that all begin with 0 may count on over documents, as models number tokens that are given no positions. With
    `document_ids` positions are always true ones. What begins a document elsewhere than the edges is refused.
    """
    num_tokens = shape[0] * shape[1]
    lengths = from_cumulative(edges, num_tokens, field)
    if not lengths or (document_ids is None and (position_ids is None or position_ids.numel() != num_tokens)):
        return whole_documents(lengths)
    if position_ids is None:
        raise UserError(f"document_ids came with {field} but without position_ids, so parts of a document have no "
                        "order; give both")
    position = _numbers(position_ids, "position_ids", shape)
    document = None if document_ids is None else _numbers(document_ids, "document_ids", shape)
    begins, cut = _begins(position, document), np.zeros(num_tokens, dtype=bool)
    cut[np.cumsum([0, *lengths[:-1]])] = True
    flat, first = position.reshape(-1), np.arange(num_tokens) % position.shape[1] == 0
    follows, from_zero = np.append(False, np.diff(flat) == 1), bool((position[:, 0] == 0).all())
    if document is not None:
        names = "position_ids and document_ids"
        follows[1:] &= np.diff(document.reshape(-1)) == 0
        wrong = (begins.reshape(-1) != cut) & ~(first & follows)
    else:
        names = "position_ids"
        wrong = np.where(cut, (flat != 0) & ~(follows if from_zero else first), (flat == 0) & _counted(flat, cut))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        said = ("begins" if cut[at] else "does not begin"), ("go on with" if cut[at] else "begin one with")
        raise UserError(f"{field} {said[0]} a document at token {at} but {names} {said[1]} position {flat[at]} there; "
                        "let them say the same, or give one of them")
    if document is None and from_zero:
        return whole_documents(lengths)
    return _slices(position, begins | cut.reshape(begins.shape), document)


def _counted(position: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """[tokens] Whether a token of the same document follows whose position is not 0; padding has zeros to its end."""
    last = np.append(np.flatnonzero(cut)[1:], len(cut)) - 1      # of each document
    latest = np.maximum.accumulate(np.where(position != 0, np.arange(len(position)), -1))[last]
    return latest[np.cumsum(cut) - 1] > np.arange(len(position))
