"""Could pipeline stages of Megatron-Core serve each other's attention while they wait? Two CPU ranks, one a stage.

Megatron's own 1F1B schedule trains a small GPT on packed documents of unequal lengths. Every wait for the neighbour and
every attention call is timed, so that three figures come from one run:

    how long each stage waits, and how much attention there is at all
    what ideal serving would gain: the measured pieces replayed, whoever waits taking part of the running attention at
        no cost; for one replica, and for two whose stages balance among themselves already, as distca's pool does
    what a thread gains that serves while its process waits: it takes blocks of queries with their keys over a gloo
        group of its own and returns results, forward and backward

A caller sees by a flag in shared memory whether its neighbour waits at that moment, which is more than ranks of two
machines could know.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import on_ranks
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from stage_replay import balanced_inside, replay, stretched
from stage_serving import DIM, HEADS, KV_HEADS, STAGES, Clock, Stage, StageAttention

LONGER = (4, 8)                                                  # stages that are replayed besides
VOCAB, HIDDEN = 256, HEADS * DIM


@dataclass(frozen=True, slots=True)
class Result:
    """One way to run the same step."""

    mode: str
    step_seconds: float
    over_home: float                                             # of the same replicas
    measured: bool                                               # else replayed


class CpuTorch:
    """torch whose "cuda" is the CPU, for Megatron's schedules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: str, **named: Any) -> torch.Tensor:
        return torch.zeros(*size, **named)


def on_cpu(stage: Stage) -> None:
    """Stand in for the GPU, and note what the schedule does: its waits and its ops stay Megatron's."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = lambda: "cpu", lambda *_: None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    schedules.torch = CpuTorch()
    communicate = p2p_communication.P2PCommunicator._communicate
    steps = {True: schedules.forward_step, False: schedules.backward_step}

    def noted_wait(self: Any, **named: Any) -> Any:
        with stage.waiting():
            return communicate(self, **named)

    def noted(forward: bool, *args: Any, **named: Any) -> Any:
        with stage.clock.op(forward):
            return steps[forward](*args, **named)

    p2p_communication.P2PCommunicator._communicate = noted_wait
    schedules.forward_step, schedules.backward_step = partial(noted, True), partial(noted, False)


def gpt(stage: Stage, layers: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float32, calculate_per_token_loss=True)
    spec = get_gpt_layer_local_spec()
    own = spec.submodules.self_attention
    own = replace(own, submodules=replace(own.submodules, core_attention=partial(StageAttention, stage=stage)))
    torch.manual_seed(0)
    return GPTModel(config, replace(spec, submodules=replace(spec.submodules, self_attention=own)), VOCAB, 1 << 16,
                    pre_process=stage.rank == 0, post_process=stage.rank == 1, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False, parallel_output=False)


def random_lengths(seed: int, num_tokens: int) -> np.ndarray:
    """Document lengths, log-uniform from 1 to `num_tokens`, that add up to it."""
    draw, lengths = np.random.default_rng(seed), [0]
    while sum(lengths) < num_tokens:
        lengths.append(min(int(num_tokens ** draw.random()), num_tokens - sum(lengths)))
    return np.array(lengths[1:])


def micro_batches(replica: int, options: dict[str, int]) -> Iterator[tuple[torch.Tensor, Any]]:
    from megatron.core.packed_seq_params import PackedSeqParams

    for number in range(options["micro_batches"]):
        lengths = random_lengths(1000 * replica + number, options["tokens"])
        edges = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
        tokens = torch.randint(VOCAB, (1, options["tokens"] + 1), generator=torch.Generator().manual_seed(number))
        yield tokens, PackedSeqParams("thd", edges, edges, max_seqlen_q=int(lengths.max()),
                                      max_seqlen_kv=int(lengths.max()))


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, packed = next(batches)

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
        return mean, torch.tensor(1, dtype=torch.int), mean.detach()

    return model(tokens[:, :-1], None, None, packed_seq_params=packed), loss


def rank_main(folder: str, options: dict[str, int]) -> list[dict[str, Any]]:
    """Every rank: a record per replica, mode and step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stage = Stage(dist.get_rank(), folder)
    on_cpu(stage)
    model, records = gpt(stage, options["layers"]), []
    for step in range(-1, options["steps"]):                     # the first one warms up
        for replica in range(options["replicas"]):
            for serves in (False, True):
                stage.clock, stage.serves, stage.served = Clock(), serves, 0
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                losses = get_forward_backward_func()(
                    forward_step_func=forward_step, data_iterator=micro_batches(replica, options), model=model,
                    num_microbatches=options["micro_batches"], seq_length=options["tokens"], micro_batch_size=1)
                with stage.waiting():                            # for the neighbour's last ops
                    dist.barrier()
                norm = sum(float(x.grad.square().sum()) for x in model.parameters()) ** 0.5
                if step >= 0:
                    records.append({"replica": replica, "serves": serves, "seconds": time.perf_counter() - begin,
                                    "waited": stage.clock.waited, "ops": stage.clock.ops, "away": stage.served,
                                    "loss": sum(map(float, losses)), "norm": norm})
    stage.close()
    return records


def best(records: list[list[dict[str, Any]]], replica: int, serves: bool) -> tuple[dict[str, Any], ...]:
    """Both stages' records of the step that was fastest, least disturbed by whatever else the machine did."""
    some = [pair for pair in zip(*records, strict=True)
            if (pair[0]["replica"], pair[0]["serves"]) == (replica, serves)]
    return min(some, key=lambda pair: max(one["seconds"] for one in pair))


def results_of(records: list[list[dict[str, Any]]], replicas: int) -> list[Result]:
    """Measured and replayed: replicas one after the other, and together where their stages balance inside."""
    home, served = ([best(records, replica, serves) for replica in range(replicas)] for serves in (False, True))
    ops = [[one["ops"] for one in pair] for pair in home]
    alone, thread = (sum(max(one["seconds"] for one in pair) for pair in kind) for kind in (home, served))
    first = [("stages at home", alone, True), ("a thread serves", thread, True),
             ("at home", sum(replay(one, serve=False) for one in ops), False),
             ("ideal serving", sum(replay(one, serve=True) for one in ops), False)]
    inside = balanced_inside(ops)
    slowest = max(replay(one, serve=False) for one in ops)
    more = [(f"{replicas} replicas at home", slowest, False),
            (f"{replicas} replicas, balanced inside stages", replay(inside, serve=False), False),
            (f"{replicas} replicas, balanced, and ideal serving", replay(inside, serve=True), False)]
    groups = [(alone, first), (slowest, more)]
    for count in LONGER:
        longer, home_seconds = stretched(inside, count), max(replay(stretched(one, count), serve=False) for one in ops)
        groups.append((home_seconds, [
            (f"{count} stages like these at home", home_seconds, False),
            (f"{count} stages, balanced inside", replay(longer, serve=False), False),
            (f"{count} stages, balanced, and ideal serving", replay(longer, serve=True), False)]))
    return [Result(mode, seconds, base / seconds, measured)
            for base, rows in groups for mode, seconds, measured in rows]


def about(records: list[list[dict[str, Any]]], replicas: int) -> dict[str, Any]:
    """Shares of a step that stages wait and attend at home; what was served; and that both modes computed the same."""
    home = [best(records, replica, False) for replica in range(replicas)]
    served = [best(records, replica, True) for replica in range(replicas)]
    attention = [[sum(p.seconds for op in one["ops"] for p in op.pieces if p.attention) / one["seconds"]
                  for one in pair] for pair in home]
    return {
        "waits_of_stages": [[one["waited"] / one["seconds"] for one in pair] for pair in home],
        "attention_of_stages": attention,
        "blocks_served_for_stages": [[one["away"] for one in pair] for pair in served],
        "seconds": [[max(one["seconds"] for one in pair) for pair in kind] for kind in (home, served)],
        "ops": [[[asdict(op) for op in one["ops"]] for one in pair] for pair in home],
        "largest_relative_difference": max(
            abs(a[name] - b[name]) / max(abs(a[name]), 1e-30) for mine, theirs in zip(home, served, strict=True)
            for a, b in zip(mine, theirs, strict=True) for name in ("loss", "norm"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4, help="of both stages together")
    parser.add_argument("--replicas", type=int, default=2, help="that are measured one by one and replayed together")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each mode; the fastest counts")
    parser.add_argument("--json", type=Path, default=RESULTS / "megatron_stages.json")
    arguments = parser.parse_args()
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    host = host_facts()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "flags").write_bytes(bytes(STAGES))
        records = on_ranks(STAGES, rank_main, folder, options)
    results, found = results_of(records, arguments.replicas), about(records, arguments.replicas)
    content = {"host": host, "options": options, "rows": results, **found}
    show(results, content)
    write_json(arguments.json, content)


def show(results: list[Result], content: dict[str, Any]) -> None:
    table = Table("", "s a step", "over home", "", title="Megatron-Core 1F1B, two stages", title_justify="left")
    for row in results:
        table.add_row(row.mode, f"{row.step_seconds:.2f}", f"{row.over_home:.2f}x",
                      "measured" if row.measured else "replayed")
    console = Console()
    console.print(table)
    for name in ("waits_of_stages", "attention_of_stages"):
        console.print(name.replace("_", " "), [[f"{share:.0%}" for share in pair] for pair in content[name]])
    console.print(f"blocks served {content['blocks_served_for_stages']}; losses and gradient norms differ by "
                  f"{content['largest_relative_difference']:.1e}")


if __name__ == "__main__":
    main()
