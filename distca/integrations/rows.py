"""Read packed documents out of a batch of rows, as padding-free collators and padding ones give them.

Attention that is cut by document needs nothing but lengths; how a batch tells them differs. Restarting positions and
cumulative lengths are the two conventions in use, and rows with padding are still common where batches are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def documents(
    position_ids: torch.Tensor | None, cu_seq_lens: torch.Tensor | None, padding: torch.Tensor | None,
    batch: int, row_len: int,
) -> tuple[list[int], np.ndarray | None]:
    """Lengths of the packed documents of `batch` rows laid end to end, and which tokens they are (None: all).

    Documents begin at each row and wherever positions do not go up by one, or where cu_seq_lens says. `padding`
    [batch, row_len] is true for tokens that count; the others belong to no document.
    """
    real = None if padding is None else padding.cpu().numpy().astype(bool)
    if real is not None and real.all():
        real = None
    if cu_seq_lens is not None:
        edges = cu_seq_lens.cpu().numpy().reshape(-1)
        if real is not None:
            raise ValueError("cu_seq_lens_q came with an attention_mask that has padding; give one of them")
        if len(edges) < 1 or edges[0] != 0 or edges[-1] != batch * row_len or (np.diff(edges) < 0).any():
            raise ValueError(f"cu_seq_lens_q is {_short(edges)} for {batch * row_len} tokens; give rising numbers from "
                             "0 to the number of tokens")
        lengths = np.diff(edges)
        return lengths[lengths > 0].tolist(), None
    if position_ids is None or position_ids.ndim != 2:
        found = "none" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
        raise ValueError(f"attention got {found}, so documents cannot be told apart; give cu_seq_lens_q, or "
                         "position_ids [rows, tokens] to a model that hands them to its attention")
    position = np.broadcast_to(position_ids.cpu().numpy(), (batch, row_len))
    begins = np.ones((batch, row_len), dtype=bool)
    begins[:, 1:] = np.diff(position, axis=1) != 1
    if real is None:
        return _runs(begins.reshape(-1)), None
    inside = np.zeros_like(real)
    inside[:, 1:] = real[:, 1:] & real[:, :-1]                   # tokens that follow another real token
    if (real.sum(axis=1) > inside.sum(axis=1) + 1).any():
        raise ValueError("attention_mask has padding between the tokens of a row; pad at one end, or pack documents "
                         "with position_ids that restart")
    begins |= ~inside
    kept = np.flatnonzero(real.reshape(-1))
    return _runs(begins.reshape(-1)[kept]), kept


def _runs(begins: np.ndarray) -> list[int]:
    return np.diff(np.append(np.flatnonzero(begins), len(begins))).tolist()


def _short(values: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}, …]" if len(values) > 8 else f"[{shown}]"
