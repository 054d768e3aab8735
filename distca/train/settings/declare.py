"""One field of the settings: its type, its limits, what people are told, and how its value is read and written.

Which fields there are, `settings` says. A value of the wrong type or outside the limits is refused by the field's name.

Refuse settings that contradict each other, naming both fields and a way out, before any process starts.

What a single field may be, setting_fields says. The shape of a model in a file is known only to the machine that holds
it, which asks `check_degrees` again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from distca.planning.schedule import layers_of_stages
from distca.planning.windows import windows_by_depth
from distca.train.model.shape import DecoderShape, check_model, decoder_shape
from distca.validation import MAX_NUMBER, UserError, parse_count, short

if TYPE_CHECKING:
    from distca.train.settings import Data, Settings


Value = int | float | bool | str
_TYPE_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Limits:
    """`least` and `most` may be reached, `above` and `below` may not."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        return abs(value) < MAX_NUMBER and self.least <= value <= self.most and self.above < value < self.below

    def broken_by(self, value: float) -> str:
        """The limits that a value is outside of, in words; all of them where it is no number."""
        words = {"least": "of at least", "above": "above", "most": "of at most", "below": "below"}
        given = {name: getattr(self, name) for name in words if math.isfinite(getattr(self, name))}
        broken = {name: limit for name, limit in given.items() if not Limits(**{name: limit}).hold(value)}
        return " and ".join(f"{words[name]} {limit:g}" for name, limit in (broken or given).items())


@dataclass(frozen=True, slots=True)
class Known:
    """One field of one section, as people are told about it."""

    name: str  # section.field
    type: type[Value]
    default: Value
    help: str
    choices: tuple[str, ...]
    limits: Limits
    common: bool  # listed by `distca train --help`
    counted: bool = False  # tokens or ranks, which people write as 64k
    when_true: str = ""  # of a text that may also be true or false: what true stands for
    words: tuple[str, ...] = ()  # texts that a number may be instead

    @property
    def wanted(self) -> str:
        return " or ".join((_TYPE_WORDS[self.type], *self.words))

    @property
    def meaning(self) -> str:
        return self.help + (f" One of: {', '.join(self.choices)}." if self.choices else "")


def setting(
    default: Value, help: str, *, choices: tuple[str, ...] = (), common: bool = False, counted: bool = False,
    when_true: str = "", words: tuple[str, ...] = (), **limits: float,
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "limits": Limits(**limits),
                                            "common": common, "counted": counted, "when_true": when_true,
                                            "words": words})


def typed(known: Known, value: object, where: str = "") -> Value:
    """The value if it has the field's type; a whole number will do for a number, and "64k" for tokens and ranks."""
    if known.counted and isinstance(value, str):
        return parse_count(f"{where}{known.name}", value)
    if isinstance(value, str) and value in known.words:
        return value
    if known.type is float and type(value) is int and abs(value) < MAX_NUMBER:
        return float(value)
    if known.when_true and isinstance(value, bool):
        return known.when_true if value else ""
    if not isinstance(value, known.type) or (isinstance(value, bool) and known.type is not bool):
        raise UserError(f"{where}{known.name} is {short(value)}; give {known.wanted}")
    return value


def from_text(known: Known, text: str) -> Value:
    if known.counted:
        return parse_count(known.name, text)
    if text in known.words:
        return text
    if known.type is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if known.when_true and text.lower() in ("true", "false"):
        return known.when_true if text.lower() == "true" else ""
    try:
        if known.type is not bool:
            return known.type(text)
    except ValueError:
        pass
    raise UserError(f"{known.name} is {short(text)}; give {known.wanted}")


def check_limits(known: Known, value: Value) -> None:
    typed(known, value)
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{known.name} is {short(value)}; give text that can be printed")
    if known.choices and value not in known.choices:
        near = get_close_matches(str(value).lower(), known.choices, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{known.name} is {value!r}; {hint}choose one of: {', '.join(known.choices)}")
    if not isinstance(value, str) and not known.limits.hold(value):
        raise UserError(f"{known.name} is {short(value)}; give {_TYPE_WORDS[known.type]} "
                        f"{known.limits.broken_by(value)}".rstrip())


def toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char
                          for char in value.replace("\\", "\\\\").replace('"', '\\"'))
        return f'"{escaped}"'
    return repr(value)


def check_together(settings: Settings) -> None:
    """Raise a one-line ValueError at the first contradiction."""
    check_model(settings.model)
    _check_dedicated(settings)
    _check_attention(settings)
    _check_ranks(settings)
    if not settings.model.load and not settings.model.config:
        check_degrees(settings, decoder_shape(settings.model))
    _check_batch(settings)
    _check_data(settings.data)
    _check_eval(settings)
    _check_outputs(settings)


def check_degrees(settings: Settings, shape: DecoderShape) -> None:
    """Refuse parallel degrees that do not divide the model."""
    model, tensor, stages = shape.model, settings.parallel.tensor, settings.parallel.pipeline
    for kind, number in (("heads", model.num_heads), ("KV heads", model.num_kv_heads),
                         ("feed-forward columns", model.ffn)):
        if number % tensor:
            raise UserError(f"parallel.tensor is {tensor} but model {model.name!r} has {number} {kind}; choose a size "
                            "that divides them")
    if (tensor - 1) * -(-model.vocab // tensor) >= model.vocab:
        raise UserError(f"parallel.tensor is {tensor} but model {model.name!r} has a vocabulary of {model.vocab}, too "
                        "few to give every tensor rank a part; choose a smaller size")
    if stages > model.num_layers:
        raise UserError(f"parallel.pipeline is {stages} but model {model.name!r} has {model.num_layers} layers; give "
                        "every stage at least one")
    if stages > 1 and shape.tied:
        raise UserError(f"parallel.pipeline is {stages} but the output layer of model {model.name!r} is its embedding "
                        "(model.tied), which another stage holds; untie them (model.untied), or use one stage")
    windows_by_depth(model.layer_windows, layers_of_stages(model.num_layers, stages),
                     shared=settings.attention.mode == "disaggregated")


def _check_dedicated(settings: Settings) -> None:
    """Refuse ranks that only serve where nobody would be left to train, or nobody would ask them."""
    attention, tensor = settings.attention, settings.parallel.tensor
    dedicated = attention.dedicated
    if not dedicated:
        return
    if dedicated >= settings.run.ranks:
        raise UserError(f"attention.dedicated is {dedicated} but there are {settings.run.ranks} ranks (run.ranks); "
                        "leave at least one to train")
    if dedicated % tensor:
        raise UserError(f"attention.dedicated is {dedicated} but heads are shared by {tensor} ranks "
                        f"(parallel.tensor), each with servers of its own; give a multiple of {tensor}")
    if attention.mode != "disaggregated":
        raise UserError(f"attention.dedicated is {dedicated} but attention.mode is {attention.mode!r}, in which the "
                        "data ranks keep attention to themselves; use 'disaggregated', or set attention.dedicated to "
                        "0")
    if attention.state != "resend":
        raise UserError(f"attention.dedicated is {dedicated} but attention.state is {attention.state!r} and dedicated "
                        "servers keep nothing; use 'resend'")
    if attention.ranks_per_node:
        raise UserError(f"attention.ranks_per_node is {attention.ranks_per_node} but attention.dedicated is "
                        f"{dedicated}, and ranks that only serve exchange in one hop; set one of them to 0")
    if attention.adapt:
        raise UserError(f"attention.adapt is true but attention.dedicated is {dedicated}, and ranks that only serve "
                        "measure nothing; set attention.adapt to false, or attention.dedicated to 0")


def _check_attention(settings: Settings) -> None:
    attention, stages = settings.attention, settings.parallel.pipeline
    if attention.tolerance == "auto" and not attention.cost:
        raise UserError("attention.tolerance is 'auto' but attention.cost is empty; name the latency table by whose "
                        "seconds it is chosen, such as h200")
    if attention.adapt and attention.mode != "disaggregated":
        raise UserError(f"attention.adapt is true but attention.mode is {attention.mode!r}, in which speeds change "
                        "nothing; use 'disaggregated', or set attention.adapt to false")
    if stages > 1 and (attention.state, attention.mode) == ("keep", "disaggregated"):
        raise UserError(f"attention.state is 'keep' but with parallel.pipeline {stages} others serve a backward than "
                        "its forward; use 'resend'")
    if attention.state == "keep" and attention.cost:
        raise UserError(f"attention.cost is {attention.cost!r}, so that backward has plans of its own, but "
                        "attention.state is 'keep', which needs forward's; use 'resend', or leave attention.cost "
                        "empty")


def _check_ranks(settings: Settings) -> None:
    tensor, stages, dedicated = settings.parallel.tensor, settings.parallel.pipeline, settings.attention.dedicated
    ranks = settings.run.ranks - dedicated
    counted = "run.ranks less attention.dedicated" if dedicated else "run.ranks"
    if ranks % tensor:
        raise UserError(f"parallel.tensor is {tensor} but there are {ranks} ranks ({counted}); choose a size that "
                        "divides them")
    if ranks // tensor % stages:
        raise UserError(f"parallel.pipeline is {stages} but there are {ranks} ranks ({counted}), {tensor} to a layer "
                        "(parallel.tensor); choose stages that divide the rest")


def _check_batch(settings: Settings) -> None:
    batch, model = settings.batch, settings.model
    if batch.ping_pong and settings.attention.mode == "disaggregated" and batch.tokens_per_rank % 2:
        raise UserError(f"batch.tokens_per_rank is {batch.tokens_per_rank}, which two nano-batches cannot share; make "
                        "it even, or set batch.ping_pong to false")
    for name in ("tile_tokens", "offload"):
        if getattr(model, name) and model.recompute != "full":
            raise UserError(f"model.{name} is {getattr(model, name)} but model.recompute is {model.recompute!r}; set "
                            "it to 'full', which keeps no more than inputs")


def _check_data(data: Data) -> None:
    for name, value in (("path", data.path), ("tokenizer", data.tokenizer)):
        if data.source == "stdlib" and value:
            raise UserError(f"data.{name} is {value!r} but data.source is 'stdlib', which takes none; set data.source "
                            "to what your documents are, such as jsonl")
    if data.source != "stdlib" and not data.path:
        raise UserError(f"data.path is empty but data.source is {data.source!r}; name the file or folder to read")
    if data.content != "text" and data.source not in ("jsonl", "table"):
        raise UserError(f"data.content is {data.content!r} but data.source is {data.source!r}; set data.source to "
                        "jsonl or table")
    if data.content == "chat" and not data.tokenizer:
        raise UserError("data.content is 'chat' but data.tokenizer is empty; name the model's tokenizer.json, with "
                        "its chat template beside it")
    if data.split and data.source != "table":
        raise UserError(f"data.split is {data.split!r} but data.source is {data.source!r}, which has no splits; leave "
                        "it empty")


def _check_eval(settings: Settings) -> None:
    chosen = settings.eval
    if chosen.every and not (chosen.fraction or chosen.path):
        raise UserError(f"eval.every is {chosen.every} but nothing is held out; set eval.fraction, to 0.01 for "
                        "example, or eval.path")
    if chosen.fraction and chosen.path:
        raise UserError(f"eval.fraction is {chosen.fraction} and eval.path is {chosen.path!r}; give one of them")
    if chosen.path and settings.data.source == "stdlib":
        raise UserError(f"eval.path is {chosen.path!r} but data.source is 'stdlib', which has no path; use "
                        "eval.fraction")


def _check_outputs(settings: Settings) -> None:
    checkpoint, log = settings.checkpoint, settings.log
    if checkpoint.every and not checkpoint.folder:
        raise UserError(f"checkpoint.every is {checkpoint.every} but checkpoint.folder is empty; name a folder, or "
                        "set checkpoint.every to 0")
    if checkpoint.export and not checkpoint.folder:
        raise UserError(f"checkpoint.export is {checkpoint.export!r} but checkpoint.folder is empty; name a folder, "
                        "from whose last checkpoint the weights are taken")
    if log.trace_step > settings.run.steps:
        raise UserError(f"log.trace_step is {log.trace_step} but run.steps is {settings.run.steps}; trace an earlier "
                        "step")
    if not log.folder:
        raise UserError("log.folder is ''; name a folder")
