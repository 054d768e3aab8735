"""Settings of a simulation: a model on a cluster, its parallelism, and the tokens of a step.

A pool rank is one tensor-parallel group: its `tp` GPUs do the same work at the same time. Pool ranks are numbered stage
by stage, as in the runtime. A step is `num_micro_batches` micro-batches of `sequences_per_micro_batch` sequences of
`context` tokens each, the same for every strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, inf, lcm, nan
from typing import Any

from distca.cost.work import RECOMPUTE
from distca.planning.schedule import layers_of_stages
from distca.spec import ClusterShape, ModelShape, unknown_name
from distca.validation import UserError, check_number, check_whole, short
from distca.workload.documents import MAX_LENGTH

TOKENS_PER_RANK = 65_536  # of a micro-batch, if the context and the number of data ranks allow it
MAX_GPUS = 65_536
MAX_MICRO_BATCHES = 4_096
MAX_SLOTS = 2**21         # pool ranks times micro-batches
NANO_BATCHES = 2          # ping and pong: rows are cut in halves
LEAST_BYTES = 1e6         # a memory from here on is in bytes, below in micro-batches


@dataclass(frozen=True, slots=True)
class Setting:
    model: ModelShape
    cluster: ClusterShape
    gpus: int
    tp: int
    pp: int
    context: int
    sequences_per_micro_batch: int
    num_micro_batches: int
    recompute: str = "auto"   # one of `cost.work.RECOMPUTE`; auto: the fastest that fits
    memory: float = 0.0       # the most that our orders may keep, in live micro-batches or bytes; 0: all of a GPU's
    ep: int = 1               # GPUs of a stage over which the experts of a layer are divided

    def __post_init__(self) -> None:
        for field in ("gpus", "tp", "pp", "ep", "context", "sequences_per_micro_batch", "num_micro_batches"):
            check_whole(field, getattr(self, field))
        self.model.kv_heads_per_rank(self.tp)
        if self.recompute not in ("auto", *RECOMPUTE):
            raise unknown_name("recompute", self.recompute, ("auto", *RECOMPUTE))
        check_number("memory", self.memory, least=0)
        if self.pp > self.model.num_layers:
            raise UserError(f"pp is {self.pp} but model {self.model.name!r} has {self.model.num_layers} layers; "
                            f"give --pp {self.model.num_layers} or less")
        if self.gpus % (self.tp * self.pp):
            nearest = max(self.gpus // (self.tp * self.pp), 1) * self.tp * self.pp
            raise UserError(f"gpus is {self.gpus}, not a multiple of tp {self.tp} times pp {self.pp}; give --gpus "
                            f"{nearest}, or another --tp or --pp")
        self._check_experts()
        tokens = self.context * self.sequences_per_micro_batch
        if tokens % (NANO_BATCHES * self.num_data):
            unit = NANO_BATCHES * self.num_data
            raise UserError(f"a micro-batch of {self.sequences_per_micro_batch} sequences of {self.context} tokens "
                            f"does not divide over two halves of {self.num_data} data ranks; give --context "
                            f"{max(self.context // unit, 1) * unit}, or another number of --sequences")

    def _check_experts(self) -> None:
        """Refuse an `ep` that divides neither experts nor a stage's GPUs, or whose groups cut pool ranks unevenly."""
        experts, gpus = self.model.experts, self.gpus // self.pp
        if self.ep == 1:
            return
        if experts is None:
            raise UserError(f"ep is {self.ep} but model {self.model.name!r} has no experts; leave --ep out, or give a "
                            "model with experts, such as qwen3-30b-a3b")
        fitting = [ep for ep in range(1, gcd(experts.num, gpus) + 1) if experts.num % ep == gpus % ep == 0
                   and max(ep, self.tp) % min(ep, self.tp) == 0]
        if self.ep not in fitting:
            raise UserError(f"ep is {self.ep}, for {experts.num} experts on a stage's {gpus} GPUs with tp {self.tp}; "
                            f"give --ep {' or '.join(map(str, fitting))}")

    @property
    def num_data(self) -> int:
        """Data ranks of one stage; a rank is `tp` GPUs."""
        return self.gpus // (self.tp * self.pp)

    @property
    def num_pool(self) -> int:
        """Ranks of the attention pool: all stages."""
        return self.num_data * self.pp

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return layers_of_stages(self.model.num_layers, self.pp)

    @property
    def modes(self) -> tuple[str, ...]:
        """What backward may recompute, from the most memory to the least."""
        return RECOMPUTE if self.recompute == "auto" else (self.recompute,)

    @property
    def max_alive(self) -> float:
        """The most micro-batches that our orders may keep alive."""
        return self.memory if 0 < self.memory < LEAST_BYTES else inf

    @property
    def max_bytes(self) -> float:
        """The most bytes that our orders may keep on a GPU."""
        return min(self.cluster.memory_bytes, self.memory if self.memory >= LEAST_BYTES else inf)

    @property
    def num_sequences(self) -> int:
        return self.sequences_per_micro_batch * self.num_micro_batches

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.context

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one micro-batch on one data rank."""
        return self.context * self.sequences_per_micro_batch // self.num_data


def setting(
    model: ModelShape, cluster: ClusterShape, *, pp: int = 1, micro_batches: int | None = None, **others: Any
) -> Setting:
    """Make one setting; see `settings` for the other arguments."""
    counts = None if micro_batches is None else (micro_batches,)
    return settings(model, cluster, pp=(pp,), micro_batches=counts, **others)[0]


def settings(
    model: ModelShape, cluster: ClusterShape, *, gpus: int, context: int, tp: int = 8, pp: Sequence[int] = (1,),
    sequences: int | None = None, micro_batches: Sequence[int] | None = None, recompute: str = "auto",
    memory: float = 0.0, ep: int = 1,
) -> tuple[Setting, ...]:
    """Make settings of the same step for every pipeline degree and number of micro-batches.

    By default there is one micro-batch without a pipeline and two per stage with one. The default number of sequences
    gives each data rank about 64K tokens per micro-batch, and at least one sequence; it divides evenly in all settings.
    """
    for field, values, most, why in (
        ("gpus", (gpus,), MAX_GPUS, "a plan of more servers takes minutes for each call"),
        ("tp", (tp,), MAX_GPUS, "the most GPUs"), ("pp", pp, MAX_GPUS, "the most GPUs"),
        ("ep", (ep,), MAX_GPUS, "the most GPUs"),
        ("context", (context,), MAX_LENGTH, "the longest document"),
        ("micro_batches", micro_batches or (1,), MAX_MICRO_BATCHES, "as each has plans of its own"),
        ("sequences", (1 if sequences is None else sequences,), MAX_LENGTH, "more than any step has"),
    ):
        for value in values:
            check_whole(field, value, most=most, why=why)
    grid = [(stages, count) for stages in pp
            for count in (micro_batches if micro_batches is not None else ((1,) if stages == 1 else (2 * stages,)))]
    for _, count in grid:
        check_whole("pool ranks times micro-batches", gpus // tp * count, least=0, most=MAX_SLOTS,
                    why="as a step's schedule is held whole")
    if sequences is None:
        halves = [NANO_BATCHES * max(gpus // (tp * stages), 1) for stages, _ in grid]
        unit = lcm(*(count * half // gcd(context, half) for half, (_, count) in zip(halves, grid, strict=True)))
        wanted = max(1, *(count * round(half // NANO_BATCHES * TOKENS_PER_RANK / context)
                          for half, (_, count) in zip(halves, grid, strict=True)))
        sequences = -(-wanted // unit) * unit
    for _, count in grid:
        if sequences % count:
            raise UserError(f"sequences is {sequences}, not a multiple of the {count} micro-batches; give --sequences "
                            f"{max(sequences // count, 1) * count}, or another --micro-batches")
    return tuple(Setting(model, cluster, gpus, tp, stages, context, sequences // count, count, recompute, memory,
                         ep)
                 for stages, count in grid)


def parse_memory(text: str | None) -> float:
    """Parse the most that our orders may keep: live micro-batches, such as 4, or bytes, such as 60GB or 60e9."""
    if text is None:
        return 0.0
    units = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
    unit = text.strip()[-2:].upper()
    try:
        value = float(text.strip()[:-2]) * units[unit] if unit in units else float(text)
    except ValueError:
        value = nan
    if not 0 < value < inf or (unit in units and value < LEAST_BYTES):
        raise UserError(f"memory is {short(text)}; give micro-batches, such as 4, or bytes, such as 60GB")
    return value
