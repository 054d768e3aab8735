"""Everything about a run in one typed place: the sections, their fields, and how they are read and written.

A run is a TOML file of the sections below; whatever it leaves out has the default written here, and the command line
overrides any field as `--section.field value`. Help texts, the documented TOML and the table in the guide are all made
from these fields, so they cannot disagree. `checks` refuses what no machine can run, `preflight` what this one cannot.
Nothing here imports torch or looks at the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

from distca.corpus.corpora import FIELDS, SOURCES
from distca.kernels import KERNELS
from distca.models import TRAINABLE
from distca.train.settings.declare import Known, Value, from_text, setting, toml_value, typed
from distca.validation import MAX_RANKS, UserError, read_toml, short
from distca.workload.packing import PLACEMENTS

MODES = ("disaggregated", "home", "per_document_cp")
MAX_STEPS = 10**9
MAX_SEED = 2**53             # what every generator takes
MAX_SECONDS = 10**8          # three years: the longest that a process group waits
MAX_MICRO_BATCHES = 4_096    # each has plans of its own
MAX_THREADS = 4_096
MAX_LAYERS = 65_536


@dataclass(frozen=True, slots=True)
class Run:
    steps: int = setting(200, "Optimizer steps in all, those of a resumed run included.", least=1, most=MAX_STEPS,
        common=True)
    seed: int = setting(0, "Seed of the weights.", most=MAX_SEED)
    ranks: int = setting(2, "Ranks to start on this machine; under torchrun or srun theirs count instead.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    device: str = setting("auto", "Where to train; auto is cuda where there is a GPU.", choices=("auto", "cpu", "cuda"),
        common=True)
    dtype: str = setting("auto", "Arithmetic of the layers; auto is bfloat16 on cuda and float32 on cpu.",
        choices=("auto", "bfloat16", "float32", "float64"))
    threads: int = setting(0, "CPU threads of a rank; 0 shares this machine's cores among its ranks.", most=MAX_THREADS)
    timeout_seconds: int = setting(600, "How long a rank waits for the others before the run fails.", least=1,
        most=MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class Model:
    name: str = setting("tiny", "Named shape of the decoder.", choices=TRAINABLE, common=True)
    config: str = setting("", "A Hugging Face config.json, or its folder, of a Llama, Mistral, Qwen2 or Qwen3 model, "
        "in place of the name; weights are drawn from run.seed.")
    load: str = setting("", "Folder of such a model with weights (config.json, safetensors) to start from; in place of "
        "the name.")
    hidden: int = setting(0, "Width of the hidden state; 0: as the model says.")
    layers: int = setting(0, "Number of layers; 0: as the model says.", most=MAX_LAYERS)
    heads: int = setting(0, "Query heads; 0: as the model says.")
    kv_heads: int = setting(0, "Key and value heads, which divide the query heads; 0: as the model says.")
    head_dim: int = setting(0, "Width of a head; 0: as the model says, and where that is hidden / heads it stays so.")
    ffn: int = setting(0, "Width of the feed-forward; 0: as the model says.")
    vocab: int = setting(0, "Different tokens that the model knows; 0: as the model says.")
    window: int = setting(0, "Keys that a query sees in every layer, itself included; 0: as the model says, -1: all.",
        least=-1)
    compile: str = setting("auto", "Compile what runs between attention calls, once for rows of any length; auto is on "
        "on cuda and off on cpu.", choices=("auto", "on", "off"))
    recompute: str = setting("none", "What backward computes again instead of keeping it: nothing, what is cheap "
        "beside matrix products, or everything but attention.", choices=("none", "selective", "full"))
    tile_tokens: int = setting(0, "Run what lies between attention calls over this many tokens at a time, so that the "
        "widest activations never exist for all; needs model.recompute full; 0 for all at once.", counted=True)
    offload: float = setting(0.0, "GB of host memory of each rank for activations that wait for backward; needs cuda "
        "and model.recompute full; 0 keeps them on the GPU.")
    rope_theta: float = setting(0.0, "Base of the rotary position angles; 0: as the model says.")
    tied: bool = setting(False, "Use the embedding as the output layer too, as some models do by themselves.")
    untied: bool = setting(False, "Give the output layer weights of its own also where the model would not.")


@dataclass(frozen=True, slots=True)
class Data:
    source: str = setting("stdlib", "Documents: Python's standard library as bytes, text files, JSON lines, a table "
        "(parquet or Arrow files, a Hugging Face dataset folder), or a Megatron .bin/.idx dataset.", choices=SOURCES,
        common=True)
    path: str = setting("", "File or folder of the documents; none for stdlib.", common=True)
    content: str = setting("text", "What a JSON line or a table's row holds: text, a conversation (the loss is on what "
        "the assistant says), or tokens.", choices=tuple(FIELDS))
    field: str = setting("", "The key or column that holds it; empty is text, messages or input_ids, by data.content.")
    split: str = setting("", "The split of a table that has several.")
    tokenizer: str = setting("", "A Hugging Face tokenizer.json or its folder; without one, texts become bytes. Chat "
        "needs one with a chat template.")
    vocab: int = setting(0, "Tokens that the vocabulary has, for data that are tokens; 0 asks data.tokenizer, or the "
        "model.")
    max_document: int = setting(0, "Cut longer documents into documents of this many tokens; 0 leaves them whole.",
        counted=True)
    seed: int = setting(0, "Seed of the order of documents.", most=MAX_SEED)


@dataclass(frozen=True, slots=True)
class Eval:
    every: int = setting(0, "Steps between evaluations on held-out documents, the last step included; 0 for none.",
        most=MAX_STEPS, common=True)
    fraction: float = setting(0.0, "Share of the documents that is held out of training, the same for any run of the "
        "data.seed.", below=1, common=True)
    path: str = setting("", "Held-out documents of their own, read as those of data.path are; instead of a fraction.")
    batches: int = setting(8, "Batches of an evaluation, always the same ones; fewer where fewer are held out.",
        least=1, most=MAX_STEPS)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    tokens_per_rank: int = setting(4096, "Tokens on each data rank in a micro-batch.", least=1, common=True,
        counted=True)
    micro_batches: int = setting(1, "Micro-batches of a step; a pipeline wants several times its stages.", least=1,
        most=MAX_MICRO_BATCHES, common=True)
    ping_pong: bool = setting(True, "Split a micro-batch into two nano-batches, one computing while the other travels; "
        "for attention.mode disaggregated.", common=True)


@dataclass(frozen=True, slots=True)
class Attention:
    mode: str = setting("disaggregated", "Who computes attention: the pool of all ranks by a balanced plan, each "
        "token's home rank with documents in the given order, or the ranks of each document alike.", choices=MODES,
        common=True)
    placement: str = setting("balanced", "Where documents live in attention.mode disaggregated: chosen for balance, or "
        "in the given order.", choices=tuple(sorted(PLACEMENTS)))
    tolerance: float | str = setting(0.05, "How far above the mean the largest attention work may be; auto: what makes "
        "each step quickest by attention.cost on attention.cluster.", most=1, common=True, words=("auto",))
    cost: str = setting("", "Latency table, shipped or from `distca profile`, or a TOML file that names one for each "
        "kind of rank: attention is balanced by its seconds, forward and backward each by its own; empty balances "
        "causal pairs.")
    cluster: str = setting("dgx-h200", "Cluster, by name or TOML file, whose links and rates attention.tolerance auto "
        "counts with.")
    adapt: bool = setting(False, "Learn from measured seconds how fast each rank's attention is beside the others' and "
        "give a slower one less; for attention.mode disaggregated.")
    kernel: str = setting("auto", "Attention kernel; auto is the fastest that fits the device.",
        choices=("auto", *KERNELS))
    state: str = setting("resend", "What servers hold for backward: nothing (resend), or their inputs (keep).",
        choices=("resend", "keep"))
    transport: str = setting("c10d", "What carries attention's bytes: torch.distributed, between nodes once per node "
        "(c10d) or once per rank (flat), the GPUs' memory inside one node (symmetric), or the latter where it is "
        "possible (auto).", choices=("c10d", "flat", "symmetric", "auto"))
    ranks_per_node: int = setting(0, "Ranks of a tensor-parallel index that share a node, numbered node by node, for "
        "plans and exchanges that stay inside nodes; 0: the ranks of a host do.", most=MAX_RANKS, counted=True)
    dedicated: int = setting(0, "How many of the ranks only serve attention: the last ones hold no layers and no "
        "tokens.", most=MAX_RANKS, counted=True)


@dataclass(frozen=True, slots=True)
class Parallel:
    tensor: int = setting(1, "Ranks that share each layer's heads and widths; the rest are data ranks.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    pipeline: int = setting(1, "Stages that the layers are cut into; attention is balanced over all of them.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    fsdp: bool = setting(True, "Shard parameters, gradients and optimizer state over the data ranks.")


@dataclass(frozen=True, slots=True)
class Optimizer:
    lr: float = setting(1e-3, "Learning rate after the warm-up.", above=0, common=True)
    min_lr_ratio: float = setting(0.1, "The last step's learning rate over lr.", most=1)
    warmup_steps: int = setting(20, "Steps over which the learning rate rises from 0.", most=MAX_STEPS)
    weight_decay: float = setting(0.1, "AdamW's decay of weight matrices.")
    beta1: float = setting(0.9, "AdamW's memory of gradients.", below=1)
    beta2: float = setting(0.95, "AdamW's memory of squared gradients.", below=1)
    clip_norm: float = setting(1.0, "Gradients of a larger norm are scaled down to it.", above=0)
    loss_chunk_tokens: int = setting(4096, "Tokens whose logits exist at the same time.", least=1, counted=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: str = setting("", "Where checkpoints go and resuming looks; empty for none.", common=True)
    every: int = setting(0, "Steps between checkpoints; 0 saves only at the end and on SIGTERM.", most=MAX_STEPS,
        common=True)
    keep: int = setting(2, "How many of the newest checkpoints stay.", least=1, most=MAX_STEPS)
    resume: bool = setting(True, "Continue from the newest good checkpoint in the folder.")
    export: str = setting("", "A new folder for the weights as a Hugging Face model, written when the run has done all "
        "its steps; empty for none.")
    on_error: str = setting("stop", "When a checkpoint cannot be written: end the run, or warn and try again at the "
        "next one. The last one's error always ends the run.", choices=("stop", "continue"))


@dataclass(frozen=True, slots=True)
class Log:
    folder: str = setting("runs/latest", "Where steps.jsonl, settings.toml and summary.json go; latest is a link to "
        "the newest run's own folder.", common=True)
    every: int = setting(1, "Steps between lines where there is no terminal.", least=1, most=MAX_STEPS)
    tensorboard: bool = setting(False, "Also write TensorBoard events into the folder.")
    wandb: str = setting("", "Also log to this project of Weights & Biases; true for one named distca.",
        when_true="distca")
    trace_step: int = setting(0, "Write a Chrome/Perfetto trace of this step into the folder; 0 for none.",
        most=MAX_STEPS)


@dataclass(frozen=True, slots=True)
class Settings:
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    eval: Eval = Eval()
    batch: BatchSettings = BatchSettings()
    attention: Attention = Attention()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def with_values(self, values: Mapping[str, Value]) -> Self:
        """Return the settings with some fields changed: "section.field" -> value."""
        changed = self
        for name, value in values.items():
            section, _, key = name.partition(".")
            changed = replace(changed, **{section: replace(getattr(changed, section), **{key: value})})
        return changed

    def sections(self) -> dict[str, Any]:
        return {section.name: getattr(self, section.name) for section in fields(self)}

    def value(self, name: str) -> Value:
        """Return the value of "section.field"."""
        section, key = name.split(".")
        value: Value = getattr(getattr(self, section), key)
        return value

    def to_toml(self) -> str:
        """Write the settings as TOML that `load_settings` reads, each field under its help text."""
        lines: list[str] = []
        for known in known_settings().values():
            section, key = known.name.split(".")
            if f"[{section}]" not in lines:
                lines += ["", f"[{section}]"]
            lines += [f"# {known.meaning}", f"{key} = {toml_value(self.value(known.name))}"]
        return "\n".join(lines[1:]) + "\n"


def load_settings(path: str | Path | None, overrides: Mapping[str, str]) -> Settings:
    """Read the file's settings, then the overrides ("section.field" -> text), without checking that they can run."""
    settings = Settings()
    if path is not None:
        settings = settings.with_values(_from_toml(Path(path)))
    known = known_settings()
    values = {}
    for written, text in overrides.items():
        name = written.replace("-", "_")
        if name not in known:
            raise unknown_setting(f"setting {written!r}", name)
        values[name] = from_text(known[name], text)
    return settings.with_values(values)


@cache
def known_settings() -> Mapping[str, Known]:
    """Return the declaration of every field, by "section.field"."""
    declared: list[tuple[str, Any]] = [(f"{section}.{one.name}", one) for section, values in
                                       Settings().sections().items() for one in fields(values)]
    return {name: Known(name, type(one.default), one.default, **one.metadata) for name, one in declared}


def unknown_setting(what: str, name: str) -> ValueError:
    """Suggest the same field in another section before similar spellings."""
    names = list(known_settings())
    key = name.rpartition(".")[2]
    near = [full for full in names if full.partition(".")[2] == key] or get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "distca train --show-settings lists them all"
    return UserError(f"{what} is unknown; {hint}")


def settings_table() -> str:
    """Write all settings as the Markdown table of the guide."""
    rows = [f"| `{known.name}` | `{toml_value(known.default)}` | {known.meaning} |"
            for known in known_settings().values()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _from_toml(path: Path) -> dict[str, Value]:
    if not path.exists():
        raise UserError(f"{path}: no such file; check the path, or write one with: distca train --show-settings")
    content = read_toml(path)
    known = known_settings()
    sections = [section.name for section in fields(Settings)]
    values: dict[str, Value] = {}
    for section, table in content.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: {section} is {short(table)} outside of any section; write it under one of "
                            f"[{'], ['.join(sections)}]")
        if section not in sections:
            near = get_close_matches(section, sections, n=1, cutoff=0.4)
            hint = f"did you mean [{near[0]}]? " if near else ""
            raise UserError(f"{path}: section [{section}] is unknown; {hint}there are [{'], ['.join(sections)}]")
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in known:
                raise unknown_setting(f"{path}: setting {name!r}", name)
            values[name] = typed(known[name], value, f"{path}: ")
    return values
