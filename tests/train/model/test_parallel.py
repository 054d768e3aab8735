"""Real ranks over gloo: whatever the mesh, loss, gradients and clipping are those of one process with all documents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from distca.kernels import dense_attention
from distca.runtime.attention import CoreAttention
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.train.model.decoder import Decoder, Segment, write_parameter
from distca.train.model.huggingface import config_of, hf_name, load_hf
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import clip_grad_norm, parallelize
from distca.train.model.shape import DecoderShape
from distca.workload.layout import Layout
from distca.workload.packing import pack
from tests.support.attention import gradient, row_index
from tests.support.plans import misplaced_plan
from tests.support.processes import run_processes, values

SHAPE = DecoderShape(ModelShape("small", 3, 24, 4, 2, 8, 40, 61))  # 61: no mesh divides the vocabulary
ROWS = {                                                         # lengths of the documents of each data rank's two rows
    "even": [[[9, 7], [16]], [[3, 3, 10], [1, 15]]],
    "odd": [[[9, 4], [2, 11]], [[13], [1, 1, 11]]],              # 13 tokens: no number of tensor ranks divides them
}
CLIP = 0.05
PATIENT: dict[str, Any] = {"timeout_seconds": 120.0, "deadline_seconds": 240.0}  # for machines that others use too


@dataclass(frozen=True)
class Case:
    data: int
    tensor: int = 1
    fsdp: bool = True
    tied: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    rows: str = "even"
    meta: bool = False


CASES = {
    "two ranks": (
        Case(2), Case(2, tied=True, recompute=True), Case(2, fsdp=False), Case(2, dtype=torch.float32),
        Case(1, 2, rows="odd"), Case(1, 2, tied=True, recompute=True, rows="odd"),
        Case(1, 2, dtype=torch.float32, meta=True), Case(2, dtype=torch.bfloat16), Case(1, 2, dtype=torch.bfloat16),
    ),
    "four ranks": (
        Case(2, 2), Case(2, 2, rows="odd", tied=True, recompute=True), Case(2, 2, fsdp=False),
        Case(2, 2, dtype=torch.float32, meta=True), Case(2, 2, dtype=torch.bfloat16),
    ),
}


def generator(seed: int = 3) -> Any:
    return torch.Generator().manual_seed(seed)


def row(data_rank: int, number: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions of one row; the same wherever it is asked for."""
    tokens = torch.randint(0, 61, (sum(lengths),), generator=generator(10 * data_rank + number))
    labels = torch.cat([torch.cat((document[1:], torch.tensor([-100]))) for document in tokens.split(lengths)])
    return tokens, labels, torch.cat([torch.arange(length) for length in lengths])


def summed_loss(decoder: Decoder,
                rows: Sequence[Sequence[torch.Tensor]],
                lengths: list[list[int]]) -> torch.Tensor:
    """All rows step by step together, as ping-pong drives them: every segment runs once per row before backward."""
    rotaries = [decoder.rotary(positions) for _, _, positions in rows]
    states = [decoder.segments[0](tokens, rotary) for (tokens, _, _), rotary in zip(rows, rotaries, strict=True)]
    for segment in list(decoder.segments)[1:]:
        outs = [dense_attention(q, k, v, length) for (_, q, k, v), length in zip(states, lengths, strict=True)]
        last = segment is decoder.segments[-1]
        states = [segment(state[0], out, *([] if last else [rotary]))
                  for state, out, rotary in zip(states, outs, rotaries, strict=True)]
    return torch.stack([chunked_cross_entropy(hidden, decoder.head_weight, labels, 5)[0]
                        for hidden, (_, labels, _) in zip(states, rows, strict=True)]).sum()


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: gradient(p) for name, p in decoder.named_parameters()}


def in_one_process(case: Case) -> tuple[float, dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Loss, gradients, norm and clipped gradients of a plain decoder that holds all data ranks' rows."""
    decoder = Decoder(replace(SHAPE, tied=case.tied), generator=generator()).to(own_dtype(case))
    lengths = [of_row for rank in ROWS[case.rows][:case.data] for of_row in rank]
    rows = [row(rank, number, of_row)
            for rank, numbers in enumerate(ROWS[case.rows][:case.data]) for number, of_row in enumerate(numbers)]
    loss = summed_loss(decoder, rows, lengths) / num_labels(case)
    loss.backward()
    grads = {name: grad.clone() for name, grad in gradients(decoder).items()}
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)
    return float(loss.detach()), grads, float(norm), gradients(decoder)


def own_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.dtype == torch.bfloat16 else case.dtype


def num_labels(case: Case) -> int:
    return sum(length - 1 for rank in ROWS[case.rows][:case.data] for of_row in rank for length in of_row)


def spread(case: Case) -> tuple[Decoder, DeviceMesh]:
    mesh = init_device_mesh("cpu", (case.data, case.tensor), mesh_dim_names=("data", "tensor"))
    decoder = Decoder(replace(SHAPE, tied=case.tied), generator=generator(), device="meta" if case.meta else "cpu")
    if not case.meta:
        decoder = decoder.to(own_dtype(case))
    parallelize(decoder, mesh, fsdp=case.fsdp, dtype=case.dtype,
                recompute="full" if case.recompute else "none")
    if case.meta:
        decoder.to_empty(device="cpu")
        decoder.reset_parameters(generator())
    return decoder, mesh


def differences(case: Case) -> dict[str, float]:
    """How far this rank is from one process: loss, then the farthest gradient, norm and clipped gradient."""
    decoder, mesh = spread(case)
    data = mesh["data"]
    lengths = ROWS[case.rows][data.get_local_rank()]
    rows = [row(data.get_local_rank(), number, of_row) for number, of_row in enumerate(lengths)]
    share = decoder(lambda decoder: summed_loss(decoder, rows, lengths)) / num_labels(case)
    share.backward()
    loss = share.detach().double()
    dist.all_reduce(loss, group=data.get_group())
    want_loss, want_grads, want_norm, want_clipped = in_one_process(case)
    farthest = {"loss": abs(float(loss) - want_loss), "gradient": farthest_from(want_grads, gradients(decoder))}
    norm = clip_grad_norm(decoder.parameters(), CLIP, mesh.get_all_groups())
    assert want_norm > 2 * CLIP
    return farthest | {"norm": abs(float(norm) - want_norm),
                       "clipped": farthest_from(want_clipped, gradients(decoder))}


def farthest_from(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    assert want.keys() == got.keys()
    assert all(grad.abs().max() > 0 for grad in want.values())
    farthest = 0.0
    for name, grad in got.items():
        write_parameter(expected := torch.empty_like(grad), want[name])
        assert isinstance(grad, DTensor) and isinstance(expected, DTensor)
        apart = (grad.to_local() - expected.to_local()).abs()
        farthest = max(farthest, float(apart.max()) if apart.numel() else 0.0)
    return farthest


def compare_all(transport: C10dTransport, which: str) -> list[dict[str, float]]:
    return [differences(case) for case in CASES[which]]


def other_ways(transport: C10dTransport, folder: str) -> dict[str, Any]:
    """What else a step and a run need of four ranks, each as a list of things that must be true."""
    case = Case(2, 2, dtype=torch.float32, tied=True)
    return {"weights": same_weights(case, Path(folder)), "kept": what_a_rank_keeps(),
            "trained": [abs(ours - alone) for ours, alone in zip(train(Case(2, 2)), train(None), strict=True)],
            "exchanged": [exchanged(recompute) for recompute in (False, True)]}


def same_weights(case: Case, folder: Path) -> list[bool]:
    """Weights are a single process's, whatever the mesh: drawn whole and then cut, or copied from a folder."""
    decoder, _ = spread(case)
    alone = Decoder(decoder.shape, generator=generator())

    def equal(one: Decoder) -> bool:
        return all(torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, alone.get_parameter(name))
                   for name, p in one.named_parameters())

    checks = [equal(decoder)]
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        save_file({hf_name(name): p.detach() for name, p in alone.named_parameters()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config_of(alone.shape, "float32")))
    dist.barrier()
    decoder.reset_parameters(generator(99))
    checks.append(not equal(decoder))
    load_hf(folder, decoder)
    checks.append(equal(decoder))
    load_hf(folder, again := Decoder(decoder.shape, generator=generator(98)))
    return [*checks, equal(again)]


def what_a_rank_keeps() -> tuple[dict[bool, int], list[str], bool]:
    """Parameters between steps, for each way to shard; and in which dtypes a bfloat16 step computes."""
    shards = {fsdp: list(spread(Case(2, 2, fsdp=fsdp))[0].parameters()) for fsdp in (True, False)}
    held = {fsdp: sum(cast(DTensor, p).to_local().numel() for p in parts) for fsdp, parts in shards.items()}
    decoder, _ = spread(Case(2, 2, dtype=torch.bfloat16))
    tokens, _, positions = row(0, 0, [4])
    rotary, inside = decoder.rotary(positions), []
    middle = decoder.segments[1]
    assert isinstance(middle, Segment) and middle.pre is not None
    middle.pre.register_forward_pre_hook(lambda module, args: inside.append(args[1]))

    def run(decoder: Decoder) -> tuple[torch.Tensor, ...]:
        x, q, _, _ = decoder.segments[0](tokens, rotary)
        return decoder.segments[1](x, q, rotary)

    with torch.no_grad():
        dtypes = [str(x.dtype) for x in (*decoder(run), *decoder.parameters())]
    unchanged = all(torch.equal(one, other) and one.dtype == other.dtype  # handed over, not computed
                    for one, other in zip(inside[0], rotary, strict=True))
    return held, dtypes, unchanged


def train(case: Case | None) -> list[float]:
    """Losses of three steps, with a look without gradients before each; on all ranks, or with None all alone."""
    if case is None:
        decoder, ranks, group = Decoder(SHAPE, generator=generator()).double(), [0, 1], None
    else:
        decoder, mesh = spread(case)
        ranks, group = [mesh["data"].get_local_rank()], mesh["data"].get_group()
    lengths = [of_row for rank in ranks for of_row in ROWS["odd"][rank]]
    rows = [row(rank, number, of_row) for rank in ranks for number, of_row in enumerate(ROWS["odd"][rank])]
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(3):
        with torch.no_grad():
            looked = decoder(lambda decoder: summed_loss(decoder, rows, lengths))
        total = decoder(lambda decoder: summed_loss(decoder, rows, lengths))
        assert float(total.detach() - looked) == 0.0
        (total / num_labels(Case(2, rows="odd"))).backward()
        optimizer.step()
        optimizer.zero_grad()
        summed = total.detach().clone()
        if group is not None:
            dist.all_reduce(summed, group=group)
        losses.append(float(summed))
    assert losses[2] < losses[1] < losses[0]
    return losses


def exchanged(recompute: bool) -> float:
    """Attention on other ranks, two rows in flight at once: farthest gradient from dense attention in one process."""
    decoder, mesh = spread(Case(2, 2, recompute=recompute))
    plans = [misplaced_plan(pack(lengths, ranks=2, tokens_per_rank=64), 2, SHAPE.model)
             for lengths in ([90, 30, 8], [60, 68])]
    assert all((plan.tasks.home != plan.tasks.server).any() for plan in plans)
    attend = CoreAttention(mesh["data"].get_group())
    rank = mesh["data"].get_local_rank()
    rows = [documents(plan.layout, row_index(plan.layout, rank)) for plan in plans]

    def run(decoder: Decoder) -> torch.Tensor:
        rotaries = [decoder.rotary(positions) for _, _, positions in rows]
        states = [decoder.segments[0](tokens, rotary) for (tokens, _, _), rotary in zip(rows, rotaries, strict=True)]
        for segment in list(decoder.segments)[1:]:
            pending = [attend.start(q, k, v, plan) for (_, q, k, v), plan in zip(states, plans, strict=True)]
            after = []
            for number, one in enumerate(pending):
                attend.serve(one)
                extra = [] if segment is decoder.segments[-1] else [rotaries[number]]
                after.append(segment(states[number][0], attend.finish(one), *extra))
            states = after
        return torch.stack([chunked_cross_entropy(hidden, decoder.head_weight, labels, 50)[0]
                            for hidden, (_, labels, _) in zip(states, rows, strict=True)]).sum()

    decoder(run).backward()
    alone = Decoder(SHAPE, generator=generator()).double()
    whole = [documents(plan.layout, torch.arange(plan.layout.num_tokens)) for plan in plans]
    summed_loss(alone, whole, [plan.layout.lengths.tolist() for plan in plans]).backward()
    return farthest_from(gradients(alone), gradients(decoder))


def documents(layout: Layout, index: torch.Tensor) -> list[torch.Tensor]:
    """Tokens, labels and positions of a layout's documents laid end to end, at these places."""
    return [column[index] for column in row(7, 0, layout.lengths.tolist())]


LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("which", CASES)
def test_loss_and_gradients_equal_a_single_process(which: str) -> None:
    cases = CASES[which]
    for rank in values(run_processes(cases[0].data * cases[0].tensor, compare_all, which, **PATIENT)):
        for case, farthest in zip(cases, rank, strict=True):
            assert max(farthest.values()) < LIMITS[case.dtype], (case, farthest)


@pytest.mark.multiprocess
def test_weights_memory_precision_training_and_attention_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ranks = values(run_processes(4, other_ways, str(tmp_path), **PATIENT))
    norms = (2 * SHAPE.model.num_layers + 1) * SHAPE.model.hidden
    total = sum(p.numel() for p in Decoder(SHAPE, device="meta").parameters())
    assert sum(rank["kept"][0][True] for rank in ranks) == total + norms       # cut by all four, norms by two
    assert sum(rank["kept"][0][False] for rank in ranks) == 2 * (total + norms)
    for rank in ranks:
        assert all(rank["weights"])
        _, dtypes, unchanged = rank["kept"]
        assert set(dtypes[:4]) == {"torch.bfloat16"} and set(dtypes[4:]) == {"torch.float32"} and unchanged
        assert max(rank["trained"]) < 1e-9
        assert max(rank["exchanged"]) < 1e-10
