"""Read a rank's slices of documents from the arguments that trainers pass to attention.

A slice is given by its length and the position of its first token in its document. Trainers pass cumulative lengths,
positions, or rows with padding. If a batch has several of these, they must agree on where documents begin.
`row_exchange` joins slices of a document that spans ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.validation import UserError

DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "document_ids", "seq_idx")
_OF_OTHERS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens", "packed_seq_params",
              "document_id", "segment_ids", "sequence_ids")      # Transformers would pass these on and ignore them


class RowSlices(NamedTuple):
    """A rank's slices of documents, in the order of its tokens."""

    start: tuple[int, ...]                   # position of each slice's first token in its document
    length: tuple[int, ...]
    document: tuple[int, ...] | None = None  # document number, unique over all ranks


def whole_documents(lengths: Sequence[int]) -> RowSlices:
    return RowSlices((0,) * len(lengths), tuple(lengths))


@dataclass(frozen=True, slots=True)
class PackedEdges:
    """Cumulative lengths of a batch's documents, with the positions and checks of the trainer's integration."""

    edges: torch.Tensor                      # [documents + 1]
    key_edges: torch.Tensor | None = None    # the same for keys
    positions: torch.Tensor | None = None    # [tokens] or [rows, tokens]; rows that begin past 0 continue a document
    check: Callable[[], None] | None = None  # called when the documents are read; raises on other errors
    lasting: bool = False                    # whether the tensors are never refilled

    def slices(self, num_tokens: int) -> RowSlices:
        _check_keys(self.edges, self.key_edges)
        if self.check is not None:
            self.check()
        if self.positions is not None and self.positions.numel() != num_tokens:
            raise UserError(f"positions have shape {tuple(self.positions.shape)} for {num_tokens} tokens; give a "
                            "position for each token")
        rows = 1 if self.positions is None or self.positions.ndim == 1 else max(self.positions.shape[0], 1)
        return from_edges(self.edges, (rows, num_tokens // rows), self.positions)


def _check_keys(edges: torch.Tensor, key_edges: torch.Tensor | None) -> None:
    """Refuse keys whose documents differ from those of the queries."""
    if key_edges is not None and key_edges is not edges and (
            key_edges.shape != edges.shape or bool((key_edges != edges).any())):
        raise UserError("cumulative lengths of keys differ from those of queries; distca serves self-attention, where "
                        "both are the same tokens")


def from_positions(position_ids: torch.Tensor, document_ids: torch.Tensor | None = None) -> RowSlices:
    """Return the slices of concatenated rows from the positions of their tokens, [tokens] or [rows, tokens]."""
    position = _numbers(position_ids, "position_ids")
    document = None if document_ids is None else _numbers(document_ids, "document_ids")
    return _slices(position, _begins(position, document), document)


def from_arguments(
    named: Mapping[str, Any], padding: torch.Tensor | None, shape: tuple[int, int]
) -> tuple[RowSlices, np.ndarray | None]:
    """Return the slices of concatenated [rows, tokens] from Transformers' arguments, and their tokens (None: all).

    Slices begin at each row and where positions do not rise by one, or at the edges in cu_seq_lens_q. `padding`
    [rows, tokens] is false for tokens of no document. `document_ids` [rows, tokens] number the documents of all ranks;
    they are needed if a document's parts are not in the order of ranks.
    """
    for name in _OF_OTHERS:
        if named.get(name) is not None:
            raise UserError(f"attention got {name}, which distca does not read; give documents by "
                            "cu_seq_lens_q, or by position_ids that restart and document_ids")
    edges, key_edges = named.get("cu_seq_lens_q"), named.get("cu_seq_lens_k")
    if edges is None and key_edges is not None:
        raise UserError("cu_seq_lens_k came without cu_seq_lens_q; give both")
    real = None if padding is None else padding.cpu().numpy().astype(bool)
    if real is not None and real.all():
        real = None
    kept = None if real is None else np.flatnonzero(real)
    if edges is None:
        slices = _from_rows(named.get("position_ids"), named.get("document_ids"), real, shape)
    else:
        _check_keys(edges, key_edges)
        if real is not None:
            raise UserError("cu_seq_lens_q came with an attention_mask that has padding; give one of them")
        slices = from_edges(edges, shape, named.get("position_ids"), named.get("document_ids"), "cu_seq_lens_q")
    for name in ("max_length_q", "max_length_k"):
        if named.get(name) is not None and slices.length and int(named[name]) < max(slices.length):
            raise UserError(f"{name} is {int(named[name])} but a document has {max(slices.length)} tokens; give the "
                            "longest one's, or leave it out")
    if named.get("seq_idx") is not None:
        _check_numbers(_numbers(named["seq_idx"], "seq_idx", shape), slices, kept)
    return slices, kept


def _from_rows(
    position_ids: torch.Tensor | None, document_ids: torch.Tensor | None, real: np.ndarray | None,
    shape: tuple[int, int],
) -> RowSlices:
    """Return the slices of rows from their positions, without padding (false in `real` [rows, tokens])."""
    if position_ids is None or position_ids.ndim != 2:
        found = "no position_ids" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
        raise UserError(f"attention got {found} and does not know where documents begin; give cu_seq_lens_q, "
                        "or position_ids [rows, tokens] to a model that passes them to its attention")
    position = _numbers(position_ids, "position_ids", shape)
    document = None if document_ids is None else _numbers(document_ids, "document_ids", shape)
    begins = _begins(position, document)
    if real is None:
        return _slices(position, begins, document)
    inside = np.zeros_like(real)
    inside[:, 1:] = real[:, 1:] & real[:, :-1]                   # real tokens after another real token
    if (real.sum(axis=1) > inside.sum(axis=1) + 1).any():
        raise UserError("attention_mask has padding between the tokens of a row; pad at one end, or pack documents "
                        "with position_ids that restart")
    return _slices(_without_left_padding(position, real)[real], (begins | ~inside)[real],
                   None if document is None else document[real])


def _check_numbers(number: np.ndarray, slices: RowSlices, kept: np.ndarray | None) -> None:
    """Refuse seq_idx [rows, tokens] unless it changes exactly where a row's slices begin."""
    at = np.arange(number.size) if kept is None else kept
    cut = np.zeros(len(at), dtype=bool)
    cut[np.cumsum((0, *slices.length[:-1]))[:len(slices.length)]] = True
    flat = number.reshape(-1)[at]
    wrong = np.flatnonzero((np.diff(flat) != 0) != cut[1:])
    wrong = wrong[at[wrong + 1] % number.shape[1] != 0]          # every row begins a slice
    if len(wrong):
        raise UserError(f"seq_idx goes from {flat[wrong[0]]} to {flat[wrong[0] + 1]} at token {at[wrong[0] + 1]}, "
                        "which is not where position_ids or cu_seq_lens_q begin documents; make them agree, or leave "
                        "it out")


def from_edges(
    edges: torch.Tensor, shape: tuple[int, int], position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None, field: str = "cumulative lengths",
) -> RowSlices:
    """Return the slices between neighbouring edges of concatenated [rows, tokens], and from positions their starts.

    If every row begins at position 0, positions may continue across documents, as models number tokens by default;
    with `document_ids` they are always positions in the document. Other disagreement with the edges is refused.
    `field` names the edges in messages.
    """
    num_tokens = shape[0] * shape[1]
    lengths = _lengths_between(edges, num_tokens, field)
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
        does, they = ("begins", "go on with") if cut[at] else ("does not begin", "begin one with")
        raise UserError(f"{field} {does} a document at token {at} but {names} {they} position {flat[at]} there; "
                        "make them agree, or give one of them")
    if document is None and from_zero:
        return whole_documents(lengths)
    return _slices(position, begins | cut.reshape(begins.shape), document)


def _lengths_between(edges: torch.Tensor, num_tokens: int, field: str) -> list[int]:
    """Return the lengths of the non-empty documents between neighbouring edges."""
    at = edges.cpu().numpy().reshape(-1)
    lengths = np.diff(at)
    if len(at) < 1 or at[0] != 0 or at[-1] != num_tokens or (lengths < 0).any():
        shown = ", ".join(str(edge) for edge in at[:8]) + (", …" if len(at) > 8 else "")
        raise UserError(f"{field} is [{shown}] for {num_tokens} tokens; give rising numbers from 0 to the number of "
                        "tokens, padding included")
    return lengths[lengths > 0].tolist()


def _numbers(tensor: torch.Tensor, field: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Return the tensor as a numpy array [rows, tokens]; a single row is broadcast to `shape`."""
    if tensor.ndim not in (1, 2) or tensor.dtype.is_floating_point:
        raise UserError(f"{field} has shape {tuple(tensor.shape)} and {tensor.dtype}; give whole numbers [tokens] or "
                        "[rows, tokens]")
    found = tensor.cpu().numpy()
    found = found if tensor.ndim == 2 else found[None]
    if shape is not None and found.shape not in (shape, (1, shape[1])):
        raise UserError(f"{field} has shape {tuple(tensor.shape)} for tokens of shape {shape}; give a number for each")
    return found if shape is None else np.broadcast_to(found, shape)


def _begins(position: np.ndarray, document: np.ndarray | None) -> np.ndarray:
    """Return [rows, tokens] whether a slice begins: at a row, a position not one higher, or another document."""
    begins = np.ones(position.shape, dtype=bool)
    begins[:, 1:] = np.diff(position, axis=1) != 1
    if document is not None:
        begins[:, 1:] |= np.diff(document, axis=1) != 0
    return begins


def _without_left_padding(position: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return positions that do not count the padding before a row's tokens, so that these tokens begin a document."""
    padded = real.argmax(axis=1)                                 # [rows] padding before the first real token
    counted = (position[:, 0] == 0) & ~real[:, 0] & (np.take_along_axis(position, padded[:, None], 1)[:, 0] == padded)
    return position - np.where(counted, padded, 0)[:, None]


def _slices(position: np.ndarray, begins: np.ndarray, document: np.ndarray | None) -> RowSlices:
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, begins.size))
    return RowSlices(tuple(position.reshape(-1)[first].tolist()), tuple(length.tolist()),
                     None if document is None else tuple(document.reshape(-1)[first].tolist()))


def _counted(position: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """Return [tokens] whether a later token of the document has a position other than 0; if not, it is padding."""
    last = np.append(np.flatnonzero(cut)[1:], len(cut)) - 1      # of each document
    latest = np.maximum.accumulate(np.where(position != 0, np.arange(len(position)), -1))[last]
    return latest[np.cumsum(cut) - 1] > np.arange(len(position))
