"""The points of the DistCA paper's figures: models, nodes, contexts, batches and data of its runs, as far as public.

Not public, and chosen here: the batch of fig3 (64K tokens a node), the replicas of fig4 (one sequence each, over the
fewest nodes that hold it), and how the batches of fig10 grow with the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from distca.models import model_named
from distca.simulate.setting import Setting, setting
from distca.spec import cluster_named

CLUSTER, TP = "dgx-h200", 8
KIB = 1024
RANK_TOKENS = 64 * KIB      # of one TP group, where a figure names no batch
REPLICA_RANKS = 4           # the fewest TP groups that hold a sequence of 512K tokens of llama3-8b
FIGURES = ("fig3", "fig4", "fig5", "fig9", "fig10", "fig11", "fig12", "appA", "memory")
DATA = ("pretrain", "prolong")


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a figure."""

    figure: str
    model: str = "llama3-8b"
    nodes: int = 1
    context: int = RANK_TOKENS
    sequences: int = 1               # of a step
    data: str = "pretrain"
    pipelines: tuple[int, ...] = (1,)  # stages to choose from

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": self.model, "nodes": self.nodes, "context": self.context, "sequences": self.sequences,
                "data": self.data}

    def settings(self) -> tuple[Setting, ...]:
        """All pipelines with 1, 2, 4, … sequences a micro-batch, at least as many micro-batches as stages."""
        whole = [self.sequences >> halved for halved in range(5) if self.sequences % (1 << halved) == 0]
        counts = (1,) if self.pipelines == (1,) else whole
        return tuple(
            setting(model_named(self.model), cluster_named(CLUSTER), gpus=self.nodes * TP, context=self.context, tp=TP,
                    pp=pp, sequences=self.sequences, micro_batches=count)
            for pp in self.pipelines for count in counts if count >= pp)


def cases(figure: str, quick: bool) -> list[Case]:
    """The points of a figure; with `quick` the few that show its shape."""
    if figure in ("fig5", "appA"):
        return [Case(figure)]
    if figure == "fig3":
        return [Case(figure, nodes=nodes, context=128 * KIB, sequences=nodes * RANK_TOKENS // (128 * KIB))
                for nodes in ((2, 8, 32) if quick else (2, 4, 8, 16, 32))]
    if figure == "fig4":
        return [Case(figure, nodes=dp * REPLICA_RANKS, context=512 * KIB, sequences=dp, data=data)
                for data in DATA[:1 if quick else 2] for dp in ((2, 8) if quick else (2, 4, 8, 16))]
    if figure == "fig9":
        return _without_pipeline(figure, quick)
    if figure == "fig10":
        return _with_pipeline(figure, quick)
    if figure == "memory":
        return [replace(case, figure=figure) for case in
                (*_without_pipeline(figure, quick), *_with_pipeline(figure, quick))]
    return [Case(figure, model=model, nodes=nodes, context=128 * KIB, sequences=sequences * nodes // 8)
            for model, sequences in (("llama3-8b", 4), ("llama-34b", 2))[:1 if quick else 2]
            for nodes in ((8,) if quick else (8, 16))]


def _without_pipeline(figure: str, quick: bool) -> list[Case]:
    found = []
    for model in ("llama3-8b", "llama-34b")[:1 if quick else 2]:
        for nodes in (16,) if quick else (8, 16, 32):
            for context in (128 * KIB, 512 * KIB) if quick else (128 * KIB, 256 * KIB, 512 * KIB):
                tokens = nodes * RANK_TOKENS if model == "llama3-8b" else nodes // 8 * context
                found += [Case(figure, model, nodes, context, tokens // context, data) for data in DATA]
    return found


def _with_pipeline(figure: str, quick: bool) -> list[Case]:
    if quick:
        return [Case(figure, "llama3-8b", 8, 128 * KIB, 8, data, (2,)) for data in DATA]
    found = []
    for model, sizes, contexts, pipelines in (
            ("llama3-8b", (8, 16, 32), (128, 256, 512), (2, 4, 8)),
            ("llama-34b", (16, 32, 64), (128, 256, 384), (1, 2, 4, 8))):
        for nodes, times in zip(sizes, (1, 2, 2), strict=True):
            for context in contexts:
                sequences = times * (8 if context == 128 else 4)
                found += [Case(figure, model, nodes, context * KIB, sequences, data, pipelines) for data in DATA]
    return found
