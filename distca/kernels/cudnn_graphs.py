"""Graphs of cuDNN's packed attention: built once for each shape, kept, and run by any thread on torch's current stream.

Building one costs up to a tenth of a second, so graphs depend on as little as they can (`GraphShape`): where rows
begin and how long they are is handed over with every run.
"""

from __future__ import annotations

import importlib
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import torch

GRAPHS_KEPT = 256

Mask = IntEnum("Mask", "NONE TOP_LEFT BOTTOM_RIGHT")
# A graph's tensors; an OFFSET holds the first element of every row in the tensor of that name.
Uid = IntEnum("Uid", "Q K V OUT LSE DOUT DQ DK DV Q_LEN K_LEN OFFSET_Q OFFSET_K OFFSET_OUT OFFSET_LSE OFFSET_DK")


class GraphShape(NamedTuple):
    """All that a graph depends on."""

    device: torch.device
    dtype: torch.dtype
    q_dim: tuple[int, ...]  # rows, heads, longest queries, dim
    k_dim: tuple[int, ...]  # rows, kv_heads, longest keys, dim
    mask: Mask
    scale: float
    totals: tuple[int, int] | None  # backward's workspace holds so many queries and keys
    deterministic: bool


_graphs: dict[GraphShape, tuple[Any, int]] = {}
_building = threading.Lock()
_of_this_thread = threading.local()  # autograd's backward runs in a thread of its own; handles must not be shared


def cudnn() -> Any:
    return importlib.import_module("cudnn")


def _handle(device: torch.device) -> Any:
    """This thread's cuDNN handle on torch's current stream."""
    handles: dict[torch.device, Any] = _of_this_thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn().create_handle()
    cudnn().set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


def execute(shape: GraphShape, pack: dict[Uid, torch.Tensor]) -> None:
    """Run the graph of this shape on these tensors."""
    handle = _handle(shape.device)
    with _building:
        if shape not in _graphs:
            if len(_graphs) == GRAPHS_KEPT:
                _graphs.pop(next(iter(_graphs)))
            _graphs[shape] = _build(shape, handle)
        graph, workspace_bytes = _graphs[shape]
    workspace = torch.empty(max(1, workspace_bytes), dtype=torch.uint8, device=shape.device)
    graph.execute({int(uid): tensor for uid, tensor in pack.items()}, workspace, handle=handle)


def _build(shape: GraphShape, handle: Any) -> tuple[Any, int]:
    """A built graph and the bytes of workspace it needs."""
    module = cudnn()
    kinds = module.data_type
    io = kinds.BFLOAT16 if shape.dtype == torch.bfloat16 else kinds.HALF
    graph = module.pygraph(
        handle=handle, io_data_type=io, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
    )
    q_dim, k_dim, lse_dim = shape.q_dim, shape.k_dim, (*shape.q_dim[:3], 1)

    def stride(dim: tuple[int, ...]) -> list[int]:  # tokens first, then heads
        _, heads, length, width = dim
        return [length * heads * width, width, heads * width, 1]

    def index(uid: Uid, count: int, kind: Any) -> Any:
        return graph.tensor(name=uid.name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=int(uid))

    def offset(uid: Uid) -> Any:
        return index(uid, q_dim[0] + 1, kinds.INT64)

    def given(uid: Uid, dim: tuple[int, ...], begins: Any, kind: Any = io) -> Any:
        tensor = graph.tensor(name=uid.name, dim=list(dim), stride=stride(dim), data_type=kind, uid=int(uid))
        tensor.set_ragged_offset(begins)
        return tensor

    def wanted(tensor: Any, uid: Uid, dim: tuple[int, ...], begins: Any, kind: Any = io) -> None:
        tensor.set_uid(int(uid)).set_output(True).set_dim(list(dim)).set_stride(stride(dim)).set_data_type(kind)
        tensor.set_ragged_offset(begins)

    q_begins, k_begins, lse_begins = (offset(u) for u in (Uid.OFFSET_Q, Uid.OFFSET_K, Uid.OFFSET_LSE))
    options: dict[str, Any] = {
        "q": given(Uid.Q, q_dim, q_begins),
        "k": given(Uid.K, k_dim, k_begins),
        "v": given(Uid.V, k_dim, k_begins),
        "attn_scale": shape.scale,
        "use_padding_mask": True,
        "seq_len_q": index(Uid.Q_LEN, q_dim[0], kinds.INT32),
        "seq_len_kv": index(Uid.K_LEN, q_dim[0], kinds.INT32),
    }
    if shape.mask != Mask.NONE:
        options["diagonal_alignment"] = getattr(module.diagonal_alignment, shape.mask.name)
        options["diagonal_band_right_bound"] = 0
    if shape.totals is None:
        out, lse = graph.sdpa(generate_stats=True, **options)
        wanted(out, Uid.OUT, q_dim, offset(Uid.OFFSET_OUT))
        wanted(lse, Uid.LSE, lse_dim, lse_begins, kinds.FLOAT)
    else:
        dq, dk, dv = graph.sdpa_backward(
            o=given(Uid.OUT, q_dim, q_begins),
            dO=given(Uid.DOUT, q_dim, q_begins),
            stats=given(Uid.LSE, lse_dim, lse_begins, kinds.FLOAT),
            max_total_seq_len_q=shape.totals[0],
            max_total_seq_len_kv=shape.totals[1],
            use_deterministic_algorithm=shape.deterministic,
            **options,
        )
        dk_begins = offset(Uid.OFFSET_DK)
        wanted(dq, Uid.DQ, q_dim, q_begins)
        wanted(dk, Uid.DK, k_dim, dk_begins)
        wanted(dv, Uid.DV, k_dim, dk_begins)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()
