"""The `distca` command: what would balanced attention save on your lengths, before renting GPUs?

Whatever a user can get wrong ends in one line on stderr and exit code 2. Modules refuse with a ValueError that names
the field, its value and the remedy; `main` is the one place that turns it into that line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import distca
from distca.cost.latency_table import LatencyTable
from distca.cost.shipped import shipped_names, shipped_table
from distca.planning.greedy import balance
from distca.planning.plan import Plan, PlanSummary
from distca.planning.tasks import tasks_at_home
from distca.report import PlanFigures, Side
from distca.report.render import print_plan
from distca.spec import ModelShape, model_named, unknown_name
from distca.workload.documents import SAMPLERS, Workload, fill, read_source, sample_lengths, standard_library_lengths
from distca.workload.layout import Layout
from distca.workload.packing import cut_at_ranks, pack, pack_workload

STANDARD_LIBRARY = "stdlib"
DEFAULT_RANKS = 8
DEFAULT_TOKENS_PER_RANK = 65_536
MAX_TOKENS = 2**36  # a million ranks of 64K: beyond it a typing error is likelier than a batch
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PROGRESS_AFTER_SECONDS = 1.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Balance attention over ranks.")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents that fill their ranks exactly; with a workload, each inside its own sequence's ranks."""

    source: str  # for people
    lengths: np.ndarray  # [documents]
    ranks: int
    tokens_per_rank: int
    workload: Workload | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Who serves, and how their work is counted."""

    model: ModelShape
    tp: int
    tolerance: float
    dedicated: int
    cost: LatencyTable | None

    def speed(self, ranks: int) -> np.ndarray:
        return np.ones(ranks + self.dedicated)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(distca.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command("plan")
def plan_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=(
        f"A workload file, a lengths file, a sampler ({', '.join(SAMPLERS)}), or {STANDARD_LIBRARY} for the files of "
        "Python's own library. A bare sampler name is the sampler; write ./NAME for a file called so."))],
    model: Annotated[str, typer.Option(help="Named model, for the bytes of a token.")] = "llama3-8b",
    tolerance: Annotated[float, typer.Option(help="How far above the mean the largest work may be, 0 to 1.")] = 0.05,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: heads are divided by it.")] = 1,
    placement: Annotated[str, typer.Option(
        help="given: documents stay where the loader puts them; balanced: placement chooses.")] = "given",
    dedicated: Annotated[int, typer.Option(help="Servers that own no tokens, besides the ranks.")] = 0,
    cost: Annotated[str | None, typer.Option(help=(
        "Latency table: a file that `distca profile` wrote, or the name of a shipped one; work is then seconds instead "
        "of causal pairs."))] = None,
    ranks: Annotated[int | None, typer.Option(
        help=f"Ranks that own tokens; {DEFAULT_RANKS} unless SOURCE says.")] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(
        help=f"{DEFAULT_TOKENS_PER_RANK} for a sampler, all that a lengths file fills.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a sampler; 0 unless given.")] = None,
    max_document: Annotated[int | None, typer.Option(help="Cut longer documents to this many tokens.")] = None,
    no_spanning: Annotated[bool, typer.Option(
        "--no-spanning", help="Cut documents at the ends of ranks; the parts do not attend to each other.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw work and bytes per rank into this file.")] = None,
) -> None:
    """Plan one batch's core attention and show it before and after."""
    for field, value, least in (("ranks", ranks, 1), ("tokens_per_rank", tokens_per_rank, 1),
                                ("max_document", max_document, 1), ("dedicated", dedicated, 0)):
        if value is not None and value < least:
            raise ValueError(f"{field} is {value}; give a whole number of at least {least}")
    save_plot = _plotter(plot) if plot else None
    pool = Pool(model_named(model), tp, tolerance, dedicated, _latency_table(cost) if cost else None)
    _warm_up(pool, placement)
    with _progress() as step:
        step("reading documents")
        batch = read_batch(source, ranks, tokens_per_rank, seed, max_document)
        if no_spanning:
            batch = without_spanning(batch)
        figures = figures_of(batch, pool, placement, step)
    if save_plot:
        save_plot(figures)
    if as_json:
        print(json.dumps(figures.as_json()))
    else:
        print_plan(figures, Console())
        if plot:
            print(f"Drawn in {plot}.")
    if figures.invalid is not None:
        raise typer.Exit(1)


@app.command("profile")
def profile_command(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model: Annotated[str, typer.Option(help="Named model, for heads and layer widths.")] = "llama3-8b",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: heads and layers are divided by it.")] = 1,
    kernel: Annotated[str, typer.Option(help="Attention kernel; auto is what training would use.")] = "auto",
    max_kv_len: Annotated[int | None, typer.Option(
        help="Longest document to measure; 524288 on a GPU, 2048 on a CPU.")] = None,
    ranks: Annotated[int | None, typer.Option(
        help="Also start this many local processes and measure exchanges between them; under torchrun its own "
             "processes are measured.")] = None,
    output: Annotated[Path, typer.Option(help="Where the latency table goes.")] = Path("latency_table.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Every second length, few samples.")] = False,
) -> None:
    """Measure this machine's attention, linear layers and network into a latency table."""
    if not output.parent.is_dir():
        raise ValueError(f"output is {str(output)!r} but the folder {str(output.parent)!r} does not exist; create it "
                         "first")
    try:
        from distca import profiling
        from distca.runtime.probe import measure_network
    except ModuleNotFoundError as error:
        raise ValueError(f"profile needs {error.name}, which is not installed; run: pip install 'distca[train]'"
                         ) from None
    chosen = profiling.settings(device, model, tp, kernel, max_kv_len, quick)
    network = measure_network(chosen.device, ranks)
    if network.measures_the_rest:
        with _progress(profiling.num_steps(chosen)) as step:
            table = profiling.profile(chosen, step, network.cost)
        table.save(output)
        print(*profiling.describe(table), f"Written to {output}.", sep="\n")


def _latency_table(name: str) -> LatencyTable:
    """A file where there is one, else a table that came with the package."""
    if not Path(name).exists() and name in shipped_names():
        return shipped_table(name)
    return LatencyTable.load(name)


def read_batch(
    source: str, ranks: int | None, tokens_per_rank: int | None, seed: int | None, max_document: int | None
) -> Batch:
    """The batch that SOURCE names. Bare names of samplers are samplers; anything else that exists is a file."""
    wanted = (ranks or DEFAULT_RANKS) * (tokens_per_rank or DEFAULT_TOKENS_PER_RANK)
    if wanted > MAX_TOKENS:
        raise ValueError(f"ranks times tokens_per_rank is {wanted} tokens; give a batch of at most {MAX_TOKENS}")
    if source in SAMPLERS:
        seed = 0 if seed is None else seed
        lengths = sample_lengths(source, wanted, seed=seed, max_document=max_document)
        return Batch(f"{source}, seed {seed}", lengths, ranks or DEFAULT_RANKS,
                     tokens_per_rank or DEFAULT_TOKENS_PER_RANK)
    if seed is not None:
        raise ValueError(f"seed is {seed} but {source!r} is not a sampler; leave --seed out or name one of: "
                         f"{', '.join(SAMPLERS)}")
    if source == STANDARD_LIBRARY:
        lengths = standard_library_lengths()
        most = int(lengths.sum()) // (ranks or DEFAULT_RANKS)
        return _batch_of_lengths("Python's standard library, a token per byte", lengths, ranks,
                                 tokens_per_rank or min(DEFAULT_TOKENS_PER_RANK, most), max_document)
    if not Path(source).exists():
        _refuse_source(source)
    content = read_source(source)
    if isinstance(content, Workload):
        return _batch_of_workload(source, content, ranks, tokens_per_rank, max_document)
    return _batch_of_lengths(source, content, ranks, tokens_per_rank, max_document)


def _refuse_source(source: str) -> None:
    names = (*SAMPLERS, STANDARD_LIBRARY)
    if Path(source).name != source or Path(source).suffix:
        raise ValueError(f"{source}: no such file; check the path, or name one of: {', '.join(names)}")
    raise ValueError(f"{unknown_name('SOURCE', source, names)}, or give the path of a workload or lengths file; no "
                     "file of this name is here")


def _batch_of_workload(
    path: str, workload: Workload, ranks: int | None, tokens_per_rank: int | None, max_document: int | None
) -> Batch:
    for field, asked, said in (("ranks", ranks, workload.ranks),
                               ("tokens_per_rank", tokens_per_rank, workload.tokens_per_rank)):
        if asked is not None and asked != said:
            raise ValueError(f"{field} is {asked} but {path} says {said}; leave the option out or change the file")
    lengths = np.concatenate(workload.sequences)
    if max_document is not None and lengths.max() > max_document:
        raise ValueError(f"max_document is {max_document} but {path} holds a document of {lengths.max()} tokens, and "
                         "cutting it would leave its ranks unfilled; leave the option out or change the file")
    return Batch(f"{workload.name} ({path})", lengths, workload.ranks, workload.tokens_per_rank, workload)


def _batch_of_lengths(
    name: str, lengths: np.ndarray, ranks: int | None, tokens_per_rank: int | None, max_document: int | None
) -> Batch:
    """As many leading documents as fill the ranks, the last one cut; all of them where nothing else is asked."""
    ranks = ranks or DEFAULT_RANKS
    whole = len(lengths)
    if max_document is not None:
        lengths = np.minimum(lengths, max_document)
    total = int(lengths.sum())
    tokens_per_rank = tokens_per_rank or total // ranks
    if tokens_per_rank == 0:
        raise ValueError(f"ranks is {ranks} but {name} holds {total} tokens; give at most {total} ranks")
    lengths = fill(lengths, ranks * tokens_per_rank)
    return Batch(f"{name}: {len(lengths):,} of {whole:,} documents", lengths, ranks, tokens_per_rank)


def without_spanning(batch: Batch) -> Batch:
    """The same tokens with every document cut at its rank's end."""
    lengths = cut_at_ranks(batch.lengths, batch.tokens_per_rank)
    workload = batch.workload
    if workload is not None:
        workload = Workload(workload.name, workload.ranks, workload.tokens_per_rank,
                            tuple(cut_at_ranks(sequence, workload.tokens_per_rank) for sequence in workload.sequences))
    return Batch(f"{batch.source}, cut at ranks", lengths, batch.ranks, batch.tokens_per_rank, workload)


def figures_of(batch: Batch, pool: Pool, placement: str, step: Callable[[str], None]) -> PlanFigures:
    """Plan, prove and measure. Only placing and balancing are timed."""
    cost = pool.cost
    if cost is not None:
        cost.require(int(batch.lengths.max()))
    step("placing documents")
    begin = perf_counter()
    layout = _layout(batch, pool, placement)
    step("balancing attention")
    plan = balance(layout, pool.model, tolerance=pool.tolerance, speed=pool.speed(batch.ranks), tp=pool.tp, cost=cost)
    plan_seconds = perf_counter() - begin
    step("proving the plan")
    invalid = _failed_proof(plan)
    step("counting bytes")
    summary = plan.summary()
    in_order = pack(batch.lengths, ranks=batch.ranks, tokens_per_rank=batch.tokens_per_rank)
    unplanned = Plan(in_order, tasks_at_home(in_order), np.ones(batch.ranks), pool.tolerance, pool.model, pool.tp, cost)
    return PlanFigures(
        source=batch.source,
        num_documents=len(batch.lengths),
        ranks=batch.ranks,
        tokens_per_rank=batch.tokens_per_rank,
        model=pool.model.name,
        tp=pool.tp,
        placement=placement,
        tolerance=pool.tolerance,
        before=_side(unplanned.summary()),
        after=_side(summary),
        smallest_shard=summary.smallest_shard,
        backward_bytes_total=summary.backward_bytes_total,
        plan_seconds=plan_seconds,
        invalid=invalid,
        limit=plan.limit,
    )


def _layout(batch: Batch, pool: Pool, placement: str) -> Layout:
    speed = pool.speed(batch.ranks)
    work = None if pool.cost is None else pool.cost.seconds(batch.lengths, batch.lengths)
    if batch.workload is not None:
        return pack_workload(batch.workload, placement=placement, tolerance=pool.tolerance, speed=speed,
                             document_work=work)
    return pack(batch.lengths, ranks=batch.ranks, tokens_per_rank=batch.tokens_per_rank, placement=placement,
                tolerance=pool.tolerance, speed=speed, document_work=work)


def _failed_proof(plan: Plan) -> str | None:
    try:
        plan.validate()
    except ValueError as error:
        return str(error)
    return None


def _side(summary: PlanSummary) -> Side:
    return Side(
        work=summary.work,
        work_max_over_mean=summary.work_max_over_mean,
        bytes_sent=summary.bytes_sent,
        bytes_received=summary.bytes_received,
        bytes_all_gather=summary.bytes_all_gather,
        num_tasks=summary.num_tasks,
        num_moved=summary.num_moved,
    )


def _warm_up(pool: Pool, placement: str) -> None:
    """Plan a thimbleful, so that first-call costs are not timed and wrong options are refused before long work."""
    batch = Batch("warm-up", np.array([3072, 512, 512]), 2, 2048)
    layout = _layout(batch, pool, placement)
    balance(layout, pool.model, tolerance=pool.tolerance, speed=pool.speed(2), tp=pool.tp, cost=pool.cost).summary()


def _plotter(path: Path) -> Callable[[PlanFigures], None]:
    """What draws into `path`; refuses before planning what would fail after it."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"plot is {str(path)!r}; give a file name that ends in {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot is {str(path)!r} but the folder {str(path.parent)!r} does not exist; create it first")
    try:
        from distca.report.plots import save_plot
    except ModuleNotFoundError as error:
        raise ValueError(f"plot needs {error.name}, which is not installed; run: pip install 'distca[plot]'") from None

    def save(figures: PlanFigures) -> None:
        try:
            save_plot(figures, path)
        except OSError as error:
            raise ValueError(f"plot is {str(path)!r} and cannot be written ({error.strerror}); give a file in a "
                             "folder that you may write to") from None

    return save


@contextmanager
def _progress(num_steps: int = 5) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr that appears when the steps take longer than a second."""
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with_bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = with_bar.add_task("", total=num_steps)
    timer = Timer(PROGRESS_AFTER_SECONDS, with_bar.start)
    timer.daemon = True

    def step(name: str) -> None:
        with_bar.update(task, description=name, advance=1)

    if with_bar.console.is_terminal:
        timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        if with_bar.live.is_started:
            with_bar.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of the user's become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without block characters still gets the numbers
    try:
        status = app(args=None if arguments is None else list(arguments), prog_name="distca", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the argument parser refuses has one, whoever ships its class
            raise
        _fail(error.format_message())
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    print(f"distca: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
