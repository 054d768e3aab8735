"""`distca profile`: measure this machine and write a latency table, with which plans predict seconds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from distca.cli.options import check_output, number, progress, say
from distca.validation import MAX_LOCAL_RANKS, UNITS_HELP, check_whole


def profile_command(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model: Annotated[str, typer.Option(help="Named model, for heads and layer widths.")] = "llama3-8b",
    tp: Annotated[int, number("Tensor-parallel size: heads and layers are divided by it.")] = 1,
    kernel: Annotated[str, typer.Option(help="Attention kernel; auto is what training would use.")] = "auto",
    max_kv_len: Annotated[int | None, number(
        f"Longest document to measure; 524288 on a GPU, 2048 on a CPU. {UNITS_HELP}")] = None,
    ranks: Annotated[int | None, number(
        "Also start this many local processes and measure exchanges between them; under torchrun its own processes "
        "are measured.")] = None,
    output: Annotated[Path, typer.Option(help="Where the latency table goes.")] = Path("latency_table.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Every second length, few samples.")] = False,
) -> None:
    """Measure this machine's attention, linear layers and network into a latency table."""
    check_output("output", output)
    if ranks is not None:
        check_whole("ranks", ranks, least=2, most=MAX_LOCAL_RANKS, why="the most processes that one machine starts")
    if max_kv_len is not None:
        check_whole("max_kv_len", max_kv_len)
    say("distca profile: loading torch …")
    from distca import profiling
    from distca.profiling.network import measure_network

    chosen = profiling.settings(device, model, tp, kernel, max_kv_len, quick)
    network, measures_the_rest = measure_network(chosen.device, ranks)
    if measures_the_rest:
        with progress(chosen.num_updates) as update:
            table = profiling.profile(chosen, update, network)
        table.save(output)
        print(*profiling.describe(table), f"Written to {output}.",
              f"Next: distca plan LENGTHS --cost {shlex.quote(str(output))} plans with these seconds.", sep="\n")
