"""Read a rank's packed documents out of what trainers hand to attention.

Attention that is cut by document needs nothing but lengths; how a batch tells them differs. Cumulative lengths and
restarting positions are the two conventions in use, and rows with padding are still common where batches are small.
"""

from __future__ import annotations

import numpy as np
import torch


def from_cumulative(edges: torch.Tensor, num_tokens: int, field: str = "cumulative lengths") -> list[int]:
    """Lengths of the documents between neighbouring edges, without empty ones; `field` names them in errors."""
    at = edges.cpu().numpy().reshape(-1)
    lengths = np.diff(at)
    if len(at) < 1 or at[0] != 0 or at[-1] != num_tokens or (lengths < 0).any():
        shown = ", ".join(str(edge) for edge in at[:8]) + (", …" if len(at) > 8 else "")
        raise ValueError(f"{field} is [{shown}] for {num_tokens} tokens; give rising numbers from 0 to the number of "
                         "tokens, padding included")
    return lengths[lengths > 0].tolist()


def from_batch(
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
        if real is not None:
            raise ValueError("cu_seq_lens_q came with an attention_mask that has padding; give one of them")
        return from_cumulative(cu_seq_lens, batch * row_len, "cu_seq_lens_q"), None
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
