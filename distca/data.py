"""Split documents into one row per rank for trainers, with equal tokens and labels that are shifted before the split.

The label of a slice's last token is the first token of the next slice, which may be on another rank. So labels are
shifted here, before documents are split, and a row has the number of labels of all ranks for the loss. Rows also have
the positions and document numbers that `distca.integrations` read. `Collator` does this inside any loader: it gathers
the documents of all ranks and returns this rank's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from distca.columns import from_text, to_text
from distca.validation import UserError, check_choice
from distca.workload.documents import IGNORED, check_lengths
from distca.workload.layout import Layout, cut_stream, layout_from_slices
from distca.workload.packing import PLACEMENTS, pack

_MASKS = ("completion_mask", "assistant_masks")  # of TRL: true for tokens in the loss
_MOST_WORDS = 1024  # 8-byte words in a rank's error message
Tokens = Sequence[int] | npt.NDArray[Any] | torch.Tensor
Labelled = tuple[np.ndarray, np.ndarray]  # a document's token ids and labels


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's tokens of a batch; `document_ids` only if a document's parts are not in the order of ranks."""

    input_ids: torch.Tensor            # [tokens] int64
    position_ids: torch.Tensor         # [tokens] int64, in the token's document
    labels: torch.Tensor               # [tokens] int64, the token itself or -100
    shift_labels: torch.Tensor         # [tokens] int64, the next token's label, also if that token is on another rank
    document_ids: torch.Tensor | None  # [tokens] int64
    num_items: int                     # labels of all ranks without -100

    def batch(self) -> dict[str, torch.Tensor]:
        """Return arguments for a Transformers model: this row, or one token of padding if it is empty."""
        named = {"input_ids": self.input_ids, "position_ids": self.position_ids, "labels": self.labels,
                 "shift_labels": self.shift_labels}
        if self.document_ids is not None:
            named["document_ids"] = self.document_ids
        if len(self.input_ids):
            return {name: column[None] for name, column in named.items()}
        filling = {"labels": IGNORED, "shift_labels": IGNORED}
        empty = {name: torch.full((1, 1), filling.get(name, 0)) for name in named}
        return {**empty, "attention_mask": torch.zeros(1, 1, dtype=torch.int64)}


def rows(
    documents: Sequence[Tokens], rank: int, ranks: int, *, labels: Sequence[Tokens] | None = None,
    placement: str = "given", tolerance: float = 0.05,
) -> Row:
    """Return this rank's row of all ranks' documents; every rank passes the same arguments but `rank`.

    `given` splits the documents in order wherever a rank is full; row lengths differ by at most one token. `balanced`
    places tokens so that attention moves less; row lengths differ by less than `ranks` tokens. `labels` (default: the
    documents) have one label per token, -100 for tokens that are not predicted.
    """
    tokens = [_column(document, f"documents[{i}]") for i, document in enumerate(documents)]
    targets = tokens if labels is None else [_column(one, f"labels[{i}]") for i, one in enumerate(labels)]
    lengths = check_lengths([len(one) for one in tokens], field="documents")
    if [len(one) for one in targets] != lengths.tolist():
        raise UserError("labels have other lengths than documents; give one label per token, -100 to leave it out")
    if not 0 <= rank < ranks:
        raise UserError(f"rank is {rank} of {ranks} ranks; give 0 to {ranks - 1}")
    check_choice("placement", placement, PLACEMENTS)
    layout = _in_order(lengths, ranks) if placement == "given" or lengths.sum() < ranks else _balanced(
        lengths, ranks, tolerance)
    shifted = [np.append(one[1:], IGNORED) for one in targets]
    mine = layout.tokens(rank)
    at = (np.cumsum(lengths) - lengths)[mine.document] + mine.position  # [tokens of this rank]
    ids, own_labels, next_labels = (torch.from_numpy(np.concatenate(every)[at]) for every in (tokens, targets, shifted))
    return Row(ids, torch.from_numpy(mine.position), own_labels, next_labels,
               None if placement == "given" else torch.from_numpy(mine.document),
               sum(int((one != IGNORED).sum()) for one in shifted))


class Collator:
    """Collator for Trainer, TRL and any loader: splits the documents of all ranks into one row per rank.

    Features have `input_ids`, and may have `labels`, TRL's `completion_mask`, `assistant_masks` and, for a packed row,
    `seq_lengths`. All ranks of `group` collate together, in their main process: `dataloader_num_workers` must be 0.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, placement: str = "given", tolerance: float = 0.05
    ) -> None:
        self.group, self.placement, self.tolerance = group, placement, tolerance

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return this rank's row of all ranks' documents, as arguments for a Transformers model."""
        rank, ranks = 0, 1
        if dist.is_initialized():
            if torch.utils.data.get_worker_info() is not None:
                raise UserError("distca.data.Collator runs in a worker of the loader, which cannot reach other ranks; "
                                "set num_workers (Trainer: dataloader_num_workers) to 0")
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        documents = _gathered(features, self.group) if ranks > 1 else [
            document for feature in features for document in _documents_in(feature)]
        return rows([ids for ids, _ in documents], rank, ranks, labels=[labels for _, labels in documents],
                    placement=self.placement, tolerance=self.tolerance).batch()


def _column(values: Tokens, field: str) -> np.ndarray:
    found = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UserError(f"{field} has shape {found.shape} and {found.dtype}; give whole numbers, one per token")
    return found.astype(np.int64, copy=False)


def _in_order(lengths: np.ndarray, ranks: int) -> Layout:
    """Concatenate the documents and split them into rows whose lengths differ by at most one token."""
    stops, total = np.cumsum(lengths), int(lengths.sum())
    document, rank, begins, ends = cut_stream(stops, total * np.arange(1, ranks + 1) // ranks)
    before = (stops - lengths)[document]
    return Layout(lengths, document, begins - before, ends - before, rank, ranks)


def _balanced(lengths: np.ndarray, ranks: int, tolerance: float) -> Layout:
    """Return a balanced placement of equal rows, to which the last few tokens are then appended."""
    stops = np.cumsum(lengths)
    divided = int(stops[-1]) // ranks * ranks
    kept = np.clip(divided - (stops - lengths), 0, lengths)      # [documents] tokens without the last few
    some = np.flatnonzero(kept)
    layout = pack(kept[some], ranks=ranks, placement="balanced", tolerance=tolerance)
    document, start, stop, rank = some[layout.document], layout.start, layout.stop.copy(), layout.rank
    ends = (stop == kept[document]) & (kept < lengths)[document]
    stop[ends] = lengths[document[ends]]
    late = np.flatnonzero(kept == 0)                             # documents entirely among the last few tokens
    return layout_from_slices(
        lengths, np.concatenate([document, late]), np.concatenate([start, np.zeros_like(late)]),
        np.concatenate([stop, lengths[late]]), np.concatenate([rank, np.full_like(late, ranks - 1)]), ranks)


def _gathered(features: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None) -> list[Labelled]:
    """Return every rank's documents, by two all-gathers: first sizes, then lengths, tokens and labels.

    A rank with invalid features sends its error message instead, and every rank raises it.
    """
    wrong: ValueError | None = None
    try:
        mine = [document for feature in features for document in _documents_in(feature)]
        lengths = [len(ids) for ids, _ in mine]
        header = [len(lengths), sum(lengths)]
        content = np.concatenate([np.array(lengths, dtype=np.int64), *(ids for ids, _ in mine),
                                  *(labels for _, labels in mine)])
    except ValueError as error:
        wrong, content = error, from_text(str(error), _MOST_WORDS)
        header = [-1, len(content)]
    headers = _all_gather(torch.tensor(header), group)
    padded = torch.zeros(max(words if count < 0 else count + 2 * words for count, words in headers), dtype=torch.int64)
    padded[:len(content)] = torch.from_numpy(content.copy())
    table = _all_gather(padded, group)
    for rank, (entry, (count, words)) in enumerate(zip(table, headers, strict=True)):
        if count < 0:
            raise UserError(f"rank {rank}: {to_text(entry[:words])}") from wrong
    documents: list[Labelled] = []
    for entry, (count, words) in zip(table, headers, strict=True):
        edges, every = np.cumsum(entry[:count])[:-1], entry[count:count + 2 * words]
        documents += zip(*(np.split(column, edges) for column in np.split(every, 2)), strict=True) if count else ()
    return documents


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> np.ndarray:
    """Return every rank's numbers [ranks, numbers]; all ranks send equally many."""
    on_cpu = "cpu:" in str(dist.get_backend_config(group))
    mine = mine.to(torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered).cpu().numpy()


def _documents_in(feature: Mapping[str, Any]) -> list[Labelled]:
    """Return the token ids and labels of each document of a feature."""
    if "input_ids" not in feature:
        raise UserError(f"a feature has {', '.join(feature) or 'nothing'} but no input_ids; tokenize the dataset, and "
                        "keep its input_ids")
    ids = _column(feature["input_ids"], "input_ids")
    labels = _column(feature["labels"], "labels").copy() if feature.get("labels") is not None else ids.copy()
    for name in _MASKS:
        if feature.get(name) is not None:
            labels[~np.asarray(feature[name], dtype=bool)] = IGNORED
    edges = np.cumsum(feature.get("seq_lengths") or [len(ids)])
    if edges[-1] != len(ids) or len(labels) != len(ids):
        raise UserError(f"a feature has {len(ids)} input_ids, {len(labels)} labels and seq_lengths of {edges[-1]}; "
                        "give as many of each")
    return [(a, b) for a, b in zip(np.split(ids, edges[:-1]), np.split(labels, edges[:-1]), strict=True) if len(a)]
