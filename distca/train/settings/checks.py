"""Refuse settings that no machine can run: a field outside its limits, or fields that contradict each other.

Every error names the fields, their values and a remedy, before any process starts. If the model's shape is in a file,
`preflight` calls `check_degrees` on the machine that has the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distca.models import IN_YOUR_TRAINER, MODELS
from distca.planning.schedule import layers_of_stages
from distca.planning.windows import windows_by_depth
from distca.train.model.shape import SIZES, DecoderShape, decoder_shape
from distca.train.settings import Settings, known_settings
from distca.train.settings.declare import check_limits
from distca.train.settings.schedule import pipeline_ticks
from distca.validation import UserError

Rule = tuple[Callable[[Settings], object], str]  # whether settings break the rule; the error, with fields in braces


def _with_servers(name: str) -> list[Rule]:
    """What runs with dedicated servers cannot do, nor those with roles for servers that may join."""
    given = f"{name} is {{{name}}}"
    return [
        (lambda s: s.value(name) % s.parallel.tensor,
         f"{given} but heads are shared by {{parallel.tensor}} ranks (parallel.tensor), each with servers of its own; "
         "give a multiple of {parallel.tensor}"),
        (lambda s: s.value(name) and s.attention.mode != "disaggregated",
         f"{given} but attention.mode is {{attention.mode!r}}, in which the data ranks keep attention to themselves; "
         f"use 'disaggregated', or set {name} to 0"),
        (lambda s: s.value(name) and s.attention.state != "resend",
         f"{given} but attention.state is {{attention.state!r}} and dedicated servers keep nothing; use 'resend'"),
        (lambda s: s.value(name) and s.attention.ranks_per_node,
         f"attention.ranks_per_node is {{attention.ranks_per_node}} but {given}, and ranks that only serve exchange in "
         "one hop; set one of them to 0"),
        (lambda s: s.value(name) and s.attention.adapt,
         f"attention.adapt is true but {given}, and ranks that only serve measure nothing; set attention.adapt to "
         f"false, or {name} to 0"),
    ]


MODEL_AND_RANKS: list[Rule] = [
    (lambda s: s.model.load and s.model.config,
     "model.load is {model.load!r} and model.config is {model.config!r}; give one of them: a loaded model has a "
     "config.json of its own"),
    (lambda s: s.model.tied and s.model.untied, "model.tied and model.untied are both true; set one of them"),
    *((lambda s, name=f"model.{field}": s.model.load and s.value(name),
       f"model.{field} is {{model.{field}}} but model.load is {{model.load!r}}, whose weights have a shape of their "
       f"own; leave model.{field} out") for field in (*SIZES, "tied", "untied")),
    (lambda s: s.attention.dedicated and s.attention.dedicated >= s.run.ranks,
     "attention.dedicated is {attention.dedicated} but there are {run.ranks} ranks (run.ranks); leave at least one to "
     "train"),
    *(rule for name in ("attention.dedicated", "attention.roles") for rule in _with_servers(name)),
    (lambda s: s.attention.tolerance == "auto" and not s.attention.cost,
     "attention.tolerance is 'auto' but attention.cost is empty; name the latency table by whose seconds it is chosen, "
     "such as h200"),
    (lambda s: s.attention.adapt and s.attention.mode != "disaggregated",
     "attention.adapt is true but attention.mode is {attention.mode!r}, in which speeds change nothing; use "
     "'disaggregated', or set attention.adapt to false"),
    (lambda s: s.parallel.pipeline > 1 and (s.attention.state, s.attention.mode) == ("keep", "disaggregated"),
     "attention.state is 'keep' but with parallel.pipeline {parallel.pipeline} backward has other servers than "
     "forward; use 'resend'"),
    (lambda s: s.attention.state == "keep" and s.attention.cost,
     "attention.cost is {attention.cost!r}, so that backward has plans of its own, but attention.state is 'keep', "
     "which needs forward's; use 'resend', or leave attention.cost empty"),
    (lambda s: (s.run.ranks - s.attention.dedicated) % s.parallel.tensor,
     "parallel.tensor is {parallel.tensor} but there are {trainers}; choose a size that divides them"),
    (lambda s: (s.run.ranks - s.attention.dedicated) // s.parallel.tensor % s.parallel.pipeline,
     "parallel.pipeline is {parallel.pipeline} but there are {trainers}, {parallel.tensor} to a layer "
     "(parallel.tensor); choose stages that divide the rest"),
]
INPUTS_AND_OUTPUTS: list[Rule] = [
    (lambda s: s.batch.ping_pong and s.attention.mode == "disaggregated" and s.batch.tokens_per_rank % 2,
     "batch.tokens_per_rank is {batch.tokens_per_rank}, which two nano-batches cannot share; make it even, or set "
     "batch.ping_pong to false"),
    *((lambda s, name=name: s.value(name) and s.model.recompute != "full",
       f"{name} is {{{name}}} but model.recompute is {{model.recompute!r}}; set it to 'full', which keeps no more than "
       "inputs") for name in ("model.tile_tokens", "model.offload")),
    *((lambda s, name=name: s.value(name) and s.data.source == "stdlib" and not s.data.mix,
       f"{name} is {{{name}!r}} but data.source is 'stdlib', which takes none; set data.source to what your documents "
       "are, such as jsonl") for name in ("data.path", "data.tokenizer")),
    (lambda s: s.data.mix and s.data.path,
     "data.mix is {data.mix!r} and data.path is {data.path!r}; give one of them"),
    (lambda s: s.data.mix and s.data.split,
     "data.split is {data.split!r} but data.mix is {data.mix!r}; leave it empty, and name the files of a split there"),
    (lambda s: s.data.source != "stdlib" and not s.data.path and not s.data.mix,
     "data.path is empty but data.source is {data.source!r}; name the file or folder to read"),
    (lambda s: s.data.mix and {one.kind for one in s.data.sources()} - {"jsonl", "table"} and s.data.content != "text",
     "data.content is {data.content!r} but data.mix is {data.mix!r}, not all of which are JSON lines or tables; leave "
     "the others out"),
    (lambda s: not s.data.mix and s.data.content != "text" and s.data.source not in ("jsonl", "table"),
     "data.content is {data.content!r} but data.source is {data.source!r}; set data.source to jsonl or table"),
    (lambda s: s.data.content == "chat" and not s.data.tokenizer,
     "data.content is 'chat' but data.tokenizer is empty; name the model's tokenizer.json, with its chat template "
     "beside it"),
    (lambda s: s.data.split and s.data.source != "table",
     "data.split is {data.split!r} but data.source is {data.source!r}, which has no splits; leave it empty"),
    (lambda s: s.eval.every and not (s.eval.fraction or s.eval.path),
     "eval.every is {eval.every} but nothing is held out; set eval.fraction, to 0.01 for example, or eval.path"),
    (lambda s: s.eval.fraction and s.eval.path,
     "eval.fraction is {eval.fraction} and eval.path is {eval.path!r}; give one of them"),
    (lambda s: s.eval.path and s.data.kind_of(s.eval.path) == "stdlib",
     "eval.path is {eval.path!r} but data.source is 'stdlib', which has no path; use eval.fraction"),
    (lambda s: s.checkpoint.every and not s.checkpoint.folder,
     "checkpoint.every is {checkpoint.every} but checkpoint.folder is empty; name a folder, or set checkpoint.every "
     "to 0"),
    *((lambda s, name=name: s.value(name) and not s.checkpoint.folder,
       f"{name} is {{{name}}} but checkpoint.folder is empty; name the folder that restarts begin from, or set it to "
       "0") for name in ("run.restarts", "checkpoint.neighbour_every")),
    (lambda s: s.checkpoint.export and not s.checkpoint.folder,
     "checkpoint.export is {checkpoint.export!r} but checkpoint.folder is empty; name a folder, from whose last "
     "checkpoint the weights are taken"),
    (lambda s: s.log.trace_step > s.run.steps,
     "log.trace_step is {log.trace_step} but run.steps is {run.steps}; trace an earlier step"),
    (lambda s: not s.log.folder, "log.folder is ''; name a folder"),
]


def check_settings(settings: Settings) -> None:
    """Raise a one-line UserError if no machine can run these settings."""
    for known in known_settings().values():
        if known.name == "model.name" and (one := MODELS.get(settings.model.name)) and one.experts:
            raise UserError(f"model.name is {one.name!r}, whose experts distca train does not have; {IN_YOUR_TRAINER}")
        check_limits(known, settings.value(known.name))
    _check(settings, MODEL_AND_RANKS)
    if not settings.model.load and not settings.model.config:
        check_degrees(settings, decoder_shape(settings.model))
    _check(settings, INPUTS_AND_OUTPUTS)


def _check(settings: Settings, rules: Iterable[Rule]) -> None:
    dedicated = settings.attention.dedicated
    trainers = (f"{settings.run.ranks - dedicated} ranks "
                f"({'run.ranks less attention.dedicated' if dedicated else 'run.ranks'})")
    for broken, refusal in rules:
        if broken(settings):
            raise UserError(refusal.format(**settings.sections(), trainers=trainers))


def check_degrees(settings: Settings, shape: DecoderShape) -> None:
    """Refuse tensor- and pipeline-parallel degrees that do not fit the model."""
    model, tensor, stages = shape.model, settings.parallel.tensor, settings.parallel.pipeline
    name = f"model {model.name!r}"
    for kind, number in (("heads", model.num_heads), ("KV heads", model.num_kv_heads),
                         ("feed-forward columns", model.ffn)):
        if number % tensor:
            raise UserError(f"parallel.tensor is {tensor} but {name} has {number} {kind}; choose a size that divides "
                            "them")
    if (tensor - 1) * -(-model.vocab // tensor) >= model.vocab:
        raise UserError(f"parallel.tensor is {tensor} but {name} has a vocabulary of {model.vocab}, too few to give "
                        "every tensor rank a part; choose a smaller size")
    if stages > model.num_layers:
        raise UserError(f"parallel.pipeline is {stages} but {name} has {model.num_layers} layers; give every stage at "
                        "least one")
    ticks = pipeline_ticks(settings, model, shape.tied)
    windows_by_depth(model.layer_windows, layers_of_stages(model.num_layers, ticks.num_parts),
                     shared=settings.attention.mode == "disaggregated" and ticks.same_phase)

