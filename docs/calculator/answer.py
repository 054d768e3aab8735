"""Answer a question of the calculator as JSON: by the functions of `distca plan` and `distca simulate` themselves.

The page runs this module in the browser, the tests run it beside the commands. A question has the commands' options
by name; an option that it leaves out, or that is empty, has the command's default. `plan` and `fit` answer while one
types; `predict` plans whole training steps and takes longer.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import numpy as np

from distca.cli.batches import BatchesAsked, read_lengths
from distca.cli.plan import plan_asked, plan_command, plan_pool
from distca.cli.simulate import simulate_command
from distca.corpus.lengths import Reading
from distca.cost.mixed_pool import find_cost
from distca.cost.network import find_cluster
from distca.cost.work import RECOMPUTE, activation_bytes
from distca.models import MODELS, model_named
from distca.planning.choose import asked_tolerance
from distca.planning.orders import one_forward_one_backward
from distca.report.planned_batches import PlannedBatches
from distca.simulate.costs import Costs
from distca.simulate.fitting import DEFAULT_CONTEXT, StepAsked, fitting_context, fitting_settings
from distca.simulate.memory import memory
from distca.simulate.setting import setting
from distca.spec import CLUSTERS, ModelShape
from distca.validation import UserError, check_whole, parse_count

STRATEGIES_SHOWN = "wlb_ideal,distca"  # the best baseline, and ours
COUNTS = ("gpus", "tp", "pp", "ep", "context", "tokens_per_rank", "sequences", "batches")
Question = Mapping[str, Any]


def answer(question: str, part: str) -> str:
    """Answer one part of a question, both JSON; a mistake in the question becomes its `error` and who reported it."""
    asked = {name: value for name, value in json.loads(question).items() if value not in ("", None)}
    try:
        for name in COUNTS:
            if isinstance(asked.get(name), str):
                asked[name] = parse_count(name, asked[name])
        if "tolerance" in asked:
            asked["tolerance"] = asked_tolerance(asked["tolerance"])
        return json.dumps(PARTS[part](asked))
    except UserError as error:
        return json.dumps({"error": str(error)})


def choices(_: Question) -> dict[str, Any]:
    """Names that the page offers, and what it starts from."""
    return {"models": list(MODELS), "clusters": {name: shape.gpu for name, shape in CLUSTERS.items()},
            "recompute": ["auto", *RECOMPUTE]}


def coefficients() -> dict[str, Any]:
    """Coefficients of the closed forms, for a page without a planner: memory of each model, and GPUs' memory."""
    costs = find_cost("h200")
    models = {}
    for name, model in MODELS.items():
        by_tp = {}
        for tp in [one for one in (1, 2, 4, 8) if _divides(model, one)]:
            one = Costs.of(model, CLUSTERS["dgx-h200"], tp, costs)
            ends = one.stage_parameters([0, 0])
            by_tp[tp] = {"layer": float(one.stage_parameters([0, 1, 0])[1]), "end": float(ends[0]),
                         "kept": {mode: float(activation_bytes(1, model, tp, mode)) for mode in RECOMPUTE}}
        models[name] = {"layers": model.num_layers, "tp": by_tp}
    return {"models": models, "memory": {name: shape.memory_bytes for name, shape in CLUSTERS.items()}}


def _divides(model: ModelShape, tp: int) -> bool:
    try:
        model.kv_heads_per_rank(tp)
    except UserError:
        return False
    return True


def plan(question: Question) -> dict[str, Any]:
    """Plan the batches as `distca plan --json` does, with the work and bytes of every rank."""
    planned = planned_batches(question)
    shown, total = planned.shown, planned.as_json()
    mean = shown.before.work.mean()
    return total | {
        "verdict": planned.verdict(), "source": planned.source, "note": planned.note, "pool": shown.pool_text,
        "work_before": (shown.before.work / mean).tolist(), "work_after": (shown.after.work / mean).tolist(),
        "sent": shown.after.bytes_sent.tolist(), "received": shown.after.bytes_received.tolist()}


def planned_batches(question: Question) -> PlannedBatches:
    options = _defaults(plan_command) | {name: question[name] for name in ("model", "tp", "cluster", "tolerance")
                                         if name in question}
    asked = BatchesAsked(question["source"], data_ranks(question), question.get("tokens_per_rank"), None, None,
                         None, False, False, Reading())
    pool = plan_pool(options["model"], options["tp"], options["tolerance"], options["dedicated"],
                     options["placement"], options["cost"], options["ranks_per_node"], options["cluster"])
    return plan_asked(asked, pool)


def data_ranks(question: Question) -> int:
    """Ranks that a micro-batch's tokens are spread over: one stage's, each `tp` GPUs."""
    gpus, tp, pp = (_given(question, name) for name in ("gpus", "tp", "pp"))
    group = tp * pp
    if gpus % group:
        raise UserError(f"gpus is {gpus}, not a multiple of tp {tp} times pp {pp}; give --gpus "
                        f"{max(gpus // group, 1) * group}, or another --tp or --pp")
    return gpus // group


def _given(question: Question, name: str) -> int:
    if name not in question:
        raise UserError(f"{name} is empty; give a whole number of at least 1")
    return check_whole(name, question[name])


def fit(question: Question) -> dict[str, Any]:
    """Memory of a GPU for everything that backward may recompute, with equal tokens on all ranks and 1F1B."""
    asked = _defaults(simulate_command) | dict(question)
    source = read_lengths(asked["source"], Reading(), lambda _: None)
    longest = DEFAULT_CONTEXT if source.lengths is None else fitting_context(int(source.lengths.max()))
    model, cluster, table = model_named(asked["model"]), find_cluster(asked["cluster"]), find_cost(asked["cost"])
    gpus, tp, pp, ep = (_given(question, name) for name in ("gpus", "tp", "pp", "ep"))
    where = setting(model, cluster, gpus=gpus, tp=tp, pp=pp, ep=ep, context=asked["context"] or longest,
                    sequences=asked["sequences"], recompute=asked["recompute"])
    source.check_context(where.context)
    costs = replace(Costs.of(model, cluster, tp, table), ep=ep)
    ticks = one_forward_one_backward(where.pp, where.num_micro_batches)
    tokens = np.full((where.num_micro_batches, where.num_data), where.tokens_per_rank)
    modes = []
    for mode in where.modes:
        held = memory(replace(costs, recompute=mode), where.layers, ticks, tokens)
        fullest = int(held.total.argmax())
        modes.append({"recompute": mode, "states": float(held.states[fullest]),
                      "activations": float(held.activations[fullest]), "total": held.peak})
    try:
        fitting_settings(model, cluster, table, StepAsked(gpus, tp, (pp,), ep, where.context, asked["sequences"],
                                                          recompute=where.recompute))
        refusal = None
    except UserError as error:
        refusal = str(error)
    return {"capacity": where.cluster.memory_bytes, "gpu": where.cluster.gpu, "modes": modes, "refusal": refusal,
            "context": where.context, "micro_batches": where.num_micro_batches,
            "sequences": where.num_sequences, "tokens_per_rank": where.tokens_per_rank}


def predict(question: Question) -> dict[str, Any]:
    """Predict a training step as `distca simulate --json` does, with what it says on stderr as `remarks`."""
    options = {name: question[name] for name in ("model", "gpus", "tp", "ep", "context", "sequences", "cluster",
                                                 "recompute", "tolerance", "batches") if name in question}
    out, remarks = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(remarks):
        simulate_command(data=question["source"], pp=str(question.get("pp", 1)), strategies=STRATEGIES_SHOWN,
                         workers=1, as_json=True, **_defaults(simulate_command, "batches") | options)
    return {**json.loads(out.getvalue()), "remarks": remarks.getvalue()}


def _defaults(command: Callable[..., None], *names: str) -> dict[str, Any]:
    """Defaults of a command's options, of all or of some."""
    return {name: one.default for name, one in inspect.signature(command).parameters.items()
            if one.default is not inspect.Parameter.empty and (not names or name in names)}


PARTS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "choices": choices, "plan": plan, "fit": fit, "predict": predict}
