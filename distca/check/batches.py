"""Batches of packed documents: as collators make them, as a trainer gives them, and the same documents alone.

`Tokens` says for every token of all ranks' batches which document it belongs to and at which position. It is read from
the batch by the same code that reads batches for distca's attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distca.data import rows
from distca.integrations.document_lengths import from_arguments
from distca.integrations.row_exchange import join_slices
from distca.validation import UserError
from distca.workload.documents import IGNORED

Batch = dict[str, Any]
LENGTHS = (41, 1, 23, 19)        # of the documents in our batches: longer than what two windows of WINDOW see
WINDOW = 8                       # of windowed layers in models that are built from a config
UNLABELLED = 10                  # tokens at the beginning of the longest document, as a prompt's
LABELS = ("labels", "shift_labels", "num_items_in_batch")
_EDGES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens")
_NUMBERS = ("seq_idx", "document_ids")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of all ranks' batches, rank after rank and row after row."""

    document: np.ndarray         # [tokens] -1: padding
    position: np.ndarray         # [tokens] in the document
    ids: np.ndarray              # [tokens]
    next_label: np.ndarray       # [tokens] what the loss compares the output of this token with, as the batch says
    due_label: np.ndarray        # [tokens] what it should be compared with: the next token of the document, or nothing
    rank_edges: tuple[int, ...]  # [ranks + 1]
    row_len: tuple[int, ...]     # [ranks]
    shifted: bool = False        # whether the model compares outputs with the labels at their own places

    @property
    def num_documents(self) -> int:
        return int(self.document.max(initial=-1)) + 1

    def of(self, document: int) -> np.ndarray:
        """Return the tokens of a document, in the order of their positions."""
        at = np.flatnonzero(self.document == document)
        return at[np.argsort(self.position[at], kind="stable")]

    def rank(self, token: int) -> int:
        return int(np.searchsorted(self.rank_edges, token, side="right")) - 1

    def here(self, rank: int) -> slice:
        return slice(self.rank_edges[rank], self.rank_edges[rank + 1])

    def name(self, token: int) -> str:
        """Say where a token is, as a person counts: rank, row and column from 0."""
        rank = self.rank(token)
        row, column = divmod(int(token) - self.rank_edges[rank], self.row_len[rank])
        on = f"rank {rank}, " if len(self.row_len) > 1 else ""
        whose = "padding" if self.document[token] < 0 else (
            f"position {self.position[token]} of document {self.document[token]}")
        return f"{on}row {row}, token {column} ({whose})"


def tokens_of(batches: Sequence[Batch], *, shifted: bool = False) -> Tokens:
    """Read the documents of all ranks' batches; a batch that contradicts itself or its neighbours is a UserError.

    With `shifted` the model compares each output with the label at its own place: `labels` are shift_labels.
    """
    if shifted:
        batches = [{**batch, "labels": None, "shift_labels": batch["labels"]} for batch in batches]
    slices, kept, ids = [], [], []
    for rank, batch in enumerate(batches):
        at = f"rank {rank}: " if len(batches) > 1 else ""
        try:
            ids.append(_ids(batch))
            found, real = _read(batch, ids[-1].shape)
        except UserError as error:
            raise UserError(f"{at}{error}") from None
        slices.append(found)
        kept.append(np.arange(ids[-1].size) if real is None else real)
    layout, edges = join_slices(slices), np.cumsum([0, *(one.size for one in ids)])
    document, position = np.full(edges[-1], -1), np.zeros(edges[-1], dtype=np.int64)
    for rank, real in enumerate(kept):
        mine = layout.rank == rank
        lengths = (layout.stop - layout.start)[mine]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        document[edges[rank] + real] = np.repeat(layout.document[mine], lengths)
        position[edges[rank] + real] = np.repeat(layout.start[mine], lengths) + within
    flat, row_len = np.concatenate([one.reshape(-1) for one in ids]), tuple(one.shape[1] for one in ids)
    given, due = _labels(batches, document, position)
    return Tokens(document, position, flat, given, due, tuple(edges.tolist()), row_len, shifted)


def _ids(batch: Batch) -> np.ndarray:
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
        raise UserError("the batch has no input_ids [rows, tokens]; return a dict of what the model takes by name, "
                        "input_ids among them")
    return ids.numpy()


def _read(batch: Batch, shape: tuple[int, int]) -> tuple[Any, np.ndarray | None]:
    """Return a rank's slices and which tokens are not padding, from whatever says where documents begin."""
    named = {name: batch.get(name) for name in (
        "position_ids", "document_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    if named["cu_seq_lens_q"] is None:
        named["cu_seq_lens_q"] = next((batch[name] for name in _EDGES if batch.get(name) is not None), None)
    mask, positions = batch.get("attention_mask"), named["position_ids"]
    mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    if positions is not None and positions.ndim == 3:            # of images: one row for time
        named["position_ids"] = positions = positions[0]
    if mask is not None and int(mask.max()) > 1:                 # numbers the documents of a row
        number = mask.numpy()
        begins = np.diff(number, axis=1, prepend=-1) != 0
        column = np.broadcast_to(np.arange(shape[1]), shape)
        named["position_ids"] = torch.from_numpy(column - np.maximum.accumulate(column * begins, axis=1))
    elif positions is None and named["cu_seq_lens_q"] is None:
        named["position_ids"] = torch.arange(shape[1])[None].expand(shape)
    _check_edges(named["position_ids"], named["cu_seq_lens_q"])
    return from_arguments(named, None if mask is None else mask > 0, shape)


def _check_edges(positions: torch.Tensor | None, edges: torch.Tensor | None) -> None:
    """Refuse edges inside documents, where positions restart at all: trainers ignore one of the two."""
    if positions is None or edges is None or not (positions[:, 1:] == 0).any():
        return
    flat = positions.reshape(-1)
    at = [edge for edge in edges.tolist() if edge < len(flat) and flat[edge] != 0]
    if at:
        raise UserError(f"position_ids have {int(flat[at[0]])} at token {at[0]}, where cumulative lengths begin a "
                        "document; make them agree")


def _labels(batches: Sequence[Batch], document: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the loss compares each output with, and what it should: the label of the document's next token."""
    given, own = [], []
    for batch in batches:
        ids = batch["input_ids"]
        labels, shifted = map(batch.get, LABELS[:2])
        blank = torch.full(ids.shape, IGNORED)
        if shifted is None:
            shifted = blank if labels is None else torch.cat([labels[:, 1:], blank[:, :1]], dim=1)
        given.append(shifted.reshape(-1))
        own.append((blank if labels is None else labels).reshape(-1))
    flat, own_label = (torch.cat(one).numpy() for one in (given, own))
    due = np.full_like(flat, IGNORED)
    order = np.lexsort((position, document))
    follows = (document[order][1:] == document[order][:-1]) & (document[order][1:] >= 0)
    at, following = order[:-1][follows], order[1:][follows]      # shift_labels alone are right where they are inside
    due[at] = flat[at] if all(batch.get("labels") is None for batch in batches) else own_label[following]
    return flat, due


def alone(batches: Sequence[Batch], tokens: Tokens, document: int) -> Batch:
    """Return a batch of one row that holds this document alone, with the arguments that the batches have."""
    at, first = tokens.of(document), batches[0]
    shape, found = first["input_ids"].shape, dict[str, Any]()
    for name, value in first.items():
        if not isinstance(value, torch.Tensor):
            found[name] = len(at) if name in _LONGEST else value
        elif name in _EDGES:
            found[name] = torch.tensor([0, len(at)], dtype=value.dtype)
        elif value.shape[:2] == shape and all(name in batch for batch in batches) and name not in _NUMBERS:
            every = torch.cat([batch[name].flatten(0, 1) for batch in batches])
            found[name] = every[torch.from_numpy(at)][None]
    if found.get("attention_mask") is not None:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    if first.get("position_ids") is not None:
        found["position_ids"] = torch.arange(len(at))[None]
    if found.get("shift_labels") is not None:
        found["shift_labels"] = torch.from_numpy(tokens.due_label[at])[None]
    if found.get("labels") is not None and tokens.shifted:
        found["labels"] = torch.from_numpy(tokens.due_label[at])[None]
    elif found.get("labels") is not None:                        # a document's first token is predicted from nothing
        found["labels"][:, 0] = IGNORED
    return found


def without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in LABELS}


def changed(batches: Sequence[Batch], tokens: Tokens, token: int) -> list[Batch]:
    """Return the batches with one token changed to another id that occurs in them."""
    rank, others = tokens.rank(token), np.setdiff1d(tokens.ids, [tokens.ids[token]])
    ids = batches[rank]["input_ids"].clone()
    new = others[len(others) // 2] if len(others) else tokens.ids[token] + 1
    ids.view(-1)[token - tokens.rank_edges[rank]] = int(new)
    return [{**batch, "input_ids": ids} if rank == at else batch for at, batch in enumerate(batches)]


def renamed(batches: Sequence[Batch], keep: Sequence[int | None], seed: int) -> list[Batch]:
    """Return the batches with other tokens: ids that occur are exchanged for each other, also in the labels."""
    ids = np.unique(np.concatenate([batch["input_ids"].numpy().reshape(-1) for batch in batches]))
    ids = np.setdiff1d(ids, [one for one in (*keep, IGNORED) if one is not None])
    table = dict(zip(ids.tolist(), np.random.default_rng(seed).permutation(ids).tolist(), strict=True))
    return [{name: value.clone().apply_(lambda one: table.get(one, one))
             if name in ("input_ids", *LABELS[:2]) and value is not None else value
             for name, value in batch.items()} for batch in batches]


def documents_of_tokens(vocab: int, skip: Sequence[int | None], lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Draw documents of these lengths, of ids from 0 that are not special ones."""
    ids = np.setdiff1d(np.arange(min(vocab, 2**16)), [one for one in skip if one is not None])
    draw = np.random.default_rng(seed)
    return [draw.choice(ids, length) for length in lengths]


def packings(vocab: int, skip: Sequence[int | None], seed: int) -> dict[str, Batch]:
    """Return the same kind of documents as collators pack them: one row, two rows, with edges, padded."""
    from transformers import DataCollatorWithFlattening

    def flat(lengths: Sequence[int], part: int, **options: bool) -> Batch:
        documents = documents_of_tokens(vocab, skip, lengths, 2 * seed + part)
        features = [{"input_ids": one.tolist(), "labels": _labelled(one)} for one in documents]
        return {**DataCollatorWithFlattening(**options)(features), "use_cache": False}

    total = sum(LENGTHS)
    two = [flat(LENGTHS, 0), flat((total - 30, 30), 1)]
    return {
        "one flattened row": flat(LENGTHS, 0),
        "two rows": {name: torch.cat([one[name] for one in two]) for name in two[0] if name != "use_cache"}
        | {"use_cache": False},
        "a flattened row with cu_seq_lens": flat(LENGTHS, 0, return_flash_attn_kwargs=True, return_seq_idx=True),
        "padded rows": _padded(documents_of_tokens(vocab, skip, (LENGTHS[0], LENGTHS[2], LENGTHS[3]), 2 * seed)),
    }


def _labelled(ids: np.ndarray) -> list[int]:
    first = UNLABELLED if len(ids) == max(LENGTHS) else 0
    return [IGNORED] * first + ids[first:].tolist()


def _padded(documents: Sequence[np.ndarray]) -> Batch:
    """Return rows of one document each: the second is padded at its end, the third at its beginning."""
    row_len = max(map(len, documents))
    ids, labels, mask = (np.full((len(documents), row_len), fill) for fill in (0, IGNORED, 0))
    for row, document in enumerate(documents):
        here = slice(row_len - len(document), None) if row == 2 else slice(0, len(document))
        ids[row, here], mask[row, here] = document, 1
        labels[row, here] = [IGNORED, *_labelled(document)[1:]]  # what padding precedes is not predicted
    position = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels),
            "attention_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(position), "use_cache": False}


def over_ranks(vocab: int, skip: Sequence[int | None], seed: int, ranks: int) -> Mapping[str, list[Batch]]:
    """Return the same documents divided over ranks, in both placements."""
    documents = documents_of_tokens(vocab, skip, [length * ranks for length in LENGTHS], seed)
    labels = [_labelled(one) for one in documents]
    return {f"documents over {ranks} ranks, {placement} placement": [
        {**rows(documents, rank, ranks, labels=labels, placement=placement).batch(), "use_cache": False}
        for rank in range(ranks)] for placement in ("given", "balanced")}
