"""Settings of a training run: typed sections of fields, read from TOML and the command line.

Fields missing in the TOML file have the defaults below; the command line overrides any field (`--section.field value`).
Help texts, the documented TOML and the guide's table are generated from these fields. `checks` refuses settings that
no machine can run, `preflight` those that this machine cannot. Does not import torch or look at the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

from distca.corpus.corpora import FIELDS, SOURCES, MixSource, kind_of, sources_of
from distca.kernels import KERNELS
from distca.models import TRAINABLE
from distca.train.settings.declare import Known, Value, from_text, setting, toml_value, typed
from distca.validation import MAX_RANKS, UserError, read_toml, short
from distca.workload.packing import PLACEMENTS

MODES = ("disaggregated", "home", "per_document_cp")
TOKENIZED = ("text", "jsonl", "table")  # kinds of sources that are kept in data.cache
MAX_STEPS = 10**9
MAX_SEED = 2**53             # accepted by every random generator
MAX_SECONDS = 10**8          # three years: the longest timeout of a process group
MAX_MICRO_BATCHES = 4_096    # plans are made for each
MAX_THREADS = 4_096
MAX_RESTARTS = 10_000
MAX_LAYERS = 65_536


@dataclass(frozen=True, slots=True)
class Run:
    steps: int = setting(200, "Optimizer steps in all, those of a resumed run included.", least=1, most=MAX_STEPS,
        common=True)
    seed: int = setting(0, "Seed of the weights.", most=MAX_SEED)
    ranks: int = setting(2, "Ranks to start on this machine; torchrun and srun set their own number instead.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    device: str = setting("auto", "Where to train; auto is cuda if there is a GPU.", choices=("auto", "cpu", "cuda"),
        common=True)
    dtype: str = setting("auto", "Arithmetic of the layers; auto is bfloat16 on cuda and float32 on cpu.",
        choices=("auto", "bfloat16", "float32", "float64"))
    threads: int = setting(0, "CPU threads of a rank; 0 shares this machine's cores among its ranks.", most=MAX_THREADS)
    timeout_seconds: int = setting(600, "How long a rank waits for other ranks before the run fails.", least=1,
        most=MAX_SECONDS)
    restarts: int = setting(0, "How often ranks on this machine are started again after one was lost, from the newest "
        "checkpoint; torchrun's --max-restarts says it for a cluster.", most=MAX_RESTARTS)


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
    head_dim: int = setting(0, "Width of a head; 0: as the model says, or hidden / heads if the model has that.")
    ffn: int = setting(0, "Width of the feed-forward; 0: as the model says.")
    vocab: int = setting(0, "Size of the model's vocabulary; 0: as the model says.")
    window: int = setting(0, "Keys that a query sees in every layer, itself included; 0: as the model says, -1: all.",
        least=-1)
    compile: str = setting("auto", "Compile the segments between attention calls, once for rows of any length; auto: "
        "on for cuda, off for cpu.", choices=("auto", "on", "off"))
    recompute: str = setting("none", "What backward recomputes to save memory: nothing, everything but matrix "
        "products and attention, or everything but attention.", choices=("none", "selective", "full"))
    tile_tokens: int = setting(0, "Run the segments between attention calls on this many tokens at a time, so that the "
        "widest activations never exist for all tokens; needs model.recompute full; 0 for all at once.", counted=True)
    offload: float = setting(0.0, "GB of host memory of each rank for activations that wait for backward; needs cuda "
        "and model.recompute full; 0 keeps them on the GPU.")
    rope_theta: float = setting(0.0, "Base of the rotary position angles; 0: as the model says.")
    tied: bool = setting(False, "Use the embedding as the output layer too, also if the model does not.")
    untied: bool = setting(False, "Give the output layer separate weights, also if the model ties it to the embedding.")


@dataclass(frozen=True, slots=True)
class Data:
    source: str = setting("stdlib", "Documents: Python's standard library as bytes, text files, JSON lines, a table "
        "(parquet or Arrow files, a Hugging Face dataset folder), or a Megatron .bin/.idx dataset.", choices=SOURCES,
        common=True)
    path: str = setting("", "File or folder of the documents; none for stdlib.", common=True)
    mix: str = setting("", "Several sources in place of data.path, each with a weight, its share of the tokens: "
        "web.jsonl:0.7, books/:0.3. A source is what its suffix says (JSON lines, parquet, Arrow, Megatron), otherwise "
        "what data.source says.")
    cache: str = setting("runs/.corpora", "Folder for the tokens of texts, JSON lines and tables: tokenized once, then "
        "memory-mapped by all ranks and later runs; empty: every rank tokenizes, and keeps the tokens in memory.")
    content: str = setting("text", "What a JSON line or a table's row holds: text, a conversation (the loss is on what "
        "the assistant says), or tokens.", choices=tuple(FIELDS))
    field: str = setting("", "The key or column that holds it; empty is text, messages or input_ids, by data.content.")
    split: str = setting("", "The split of a table that has several.")
    tokenizer: str = setting("", "A Hugging Face tokenizer.json or its folder; without one, texts become bytes. Chat "
        "needs one with a chat template.")
    vocab: int = setting(0, "Size of the vocabulary, for data that are tokens; 0: that of data.tokenizer, or of the "
        "model.")
    max_document: int = setting(0, "Cut longer documents into documents of this many tokens; 0 leaves them whole.",
        counted=True)
    seed: int = setting(0, "Seed of the order of documents.", most=MAX_SEED)

    def sources(self) -> list[MixSource]:
        return sources_of(self.mix, self.source, self.path)

    @property
    def is_cached(self) -> bool:
        return bool(self.cache) and any(one.kind in TOKENIZED for one in self.sources())

    def kind_of(self, path: str) -> str:
        """Return which of SOURCES a path is: with a mix by its suffix, otherwise `source`."""
        return kind_of(path, self.source) if self.mix else self.source


@dataclass(frozen=True, slots=True)
class Eval:
    every: int = setting(0, "Steps between evaluations on held-out documents, the last step included; 0 for none.",
        most=MAX_STEPS, common=True)
    fraction: float = setting(0.0, "Share of the documents that is held out of training, chosen by data.seed.", below=1,
        common=True)
    path: str = setting("", "File or folder of held-out documents, read like data.path; instead of a fraction.")
    batches: int = setting(8, "Batches of an evaluation, the same every time; fewer if too little is held out.",
        least=1, most=MAX_STEPS)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    tokens_per_rank: int = setting(4096, "Tokens on each data rank in a micro-batch.", least=1, common=True,
        counted=True)
    micro_batches: int = setting(1, "Micro-batches of a step; a pipeline wants several times its stages.", least=1,
        most=MAX_MICRO_BATCHES, common=True)
    ping_pong: bool = setting(True, "Split a micro-batch into two nano-batches: one computes while the other "
        "communicates; for attention.mode disaggregated.", common=True)


@dataclass(frozen=True, slots=True)
class Attention:
    mode: str = setting("disaggregated", "Which ranks compute attention: all ranks as one pool, by a balanced plan; "
        "each token's home rank, with documents in the given order; or the data ranks, which split every document "
        "evenly.", choices=MODES, common=True)
    placement: str = setting("balanced", "Where documents live in attention.mode disaggregated: chosen for balance, or "
        "in the given order.", choices=tuple(sorted(PLACEMENTS)))
    tolerance: float | str = setting(0.05, "How far above the mean any rank's attention work may be; auto: the value "
        "with the shortest step by attention.cost and attention.cluster.", most=1, common=True, words=("auto",))
    cost: str = setting("", "Latency table, shipped or from `distca profile`, or a TOML file that names one for each "
        "kind of rank: forward and backward attention are balanced by its seconds; empty balances causal pairs.")
    cluster: str = setting("dgx-h200", "Cluster, by name or TOML file, whose links and rates attention.tolerance auto "
        "and parallel.schedule auto assume.")
    adapt: bool = setting(False, "Measure the relative speed of each rank's attention and give slower ranks less work; "
        "for attention.mode disaggregated.")
    kernel: str = setting("auto", "Attention kernel; auto is the fastest that fits the device.",
        choices=("auto", *KERNELS))
    state: str = setting("resend", "What servers hold for backward: nothing (resend), or their inputs (keep).",
        choices=("resend", "keep"))
    transport: str = setting("c10d", "How attention's tensors are sent: by torch.distributed, between nodes once per "
        "node (c10d) or once per rank (flat), by symmetric memory of the GPUs of one node (symmetric), or "
        "symmetric if possible (auto).", choices=("c10d", "flat", "symmetric", "auto"))
    ranks_per_node: int = setting(0, "Ranks per node with the same tensor-parallel index, numbered node by node, for "
        "plans and exchanges that stay inside nodes; 0: the ranks of each host.", most=MAX_RANKS, counted=True)
    dedicated: int = setting(0, "Number of ranks, the last ones, that only serve attention and hold no layers and "
        "no tokens.", most=MAX_RANKS, counted=True)
    roles: int = setting(0, "Parts of each call that plans give to dedicated servers, dealt over those present: more "
        "than attention.dedicated if servers will join later; 0: attention.dedicated.", most=MAX_RANKS, counted=True)
    patience: float = setting(10.0, "Seconds that a dedicated server may be late before it counts as lost; longer if "
        "20 times its predicted seconds are longer.", above=0)
    links: str = setting("tcp", "How tensors go to dedicated servers and back: through host memory and TCP (tcp), "
        "or read where they are, also in the memory of GPUs (nixl).", choices=("tcp", "nixl"))
    listen: str = setting("", "Address at which training ranks accept servers, with a port to which the rank is "
        "added (10.0.0.7:29600) or without; empty: this host's address towards the launcher's, any port.")


@dataclass(frozen=True, slots=True)
class Parallel:
    tensor: int = setting(1, "Tensor-parallel ranks, which share the heads and widths of each layer.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    pipeline: int = setting(1, "Pipeline stages of the layers; attention is balanced over all stages.", least=1,
        most=MAX_RANKS, common=True, counted=True)
    schedule: str = setting("auto", "Order of a pipeline's work: interleaved_N (N parts of the layers on each stage, "
        "weight gradients in idle time, the head on all stages), same_phase (one part a stage), or with attention "
        "within a stage zb_h1 and 1f1b, which keep the least memory, and interleaved_1f1b_N; auto: the one predicted "
        "to be the fastest that fits.")
    memory: float = setting(0.0, "The most that parallel.schedule auto may keep on a rank: micro-batches between "
        "forward and backward, such as 4, or bytes in all, such as 60e9; 0: the memory of attention.cluster's GPUs.")
    fsdp: bool = setting(True, "Shard parameters, gradients and optimizer state over the data ranks.")


@dataclass(frozen=True, slots=True)
class Optimizer:
    lr: float = setting(1e-3, "Learning rate after the warm-up.", above=0, common=True)
    min_lr_ratio: float = setting(0.1, "The last step's learning rate over lr.", most=1)
    warmup_steps: int = setting(20, "Steps over which the learning rate rises from 0.", most=MAX_STEPS)
    weight_decay: float = setting(0.1, "AdamW's weight decay, for matrices.")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient.", below=1)
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient.", below=1)
    clip_norm: float = setting(1.0, "Largest gradient norm; larger gradients are scaled down.", above=0)
    loss_chunk_tokens: int = setting(4096, "Tokens whose logits exist at the same time.", least=1, counted=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: str = setting("", "Folder for checkpoints to write and to resume from; empty for none.", common=True)
    every: int = setting(0, "Steps between checkpoints; 0 saves only at the end and on SIGTERM.", most=MAX_STEPS,
        common=True)
    neighbour_every: int = setting(0, "Steps between checkpoints in host memory, of this host and of the next, from "
        "which a restart takes seconds; 0 for none.", most=MAX_STEPS)
    keep: int = setting(2, "Number of newest checkpoints to keep.", least=1, most=MAX_STEPS)
    resume: bool = setting(True, "Continue from the newest good checkpoint in the folder.")
    export: str = setting("", "A new folder for the weights as a Hugging Face model, written when the run has done all "
        "its steps; empty for none.")
    on_error: str = setting("stop", "When a checkpoint cannot be written: end the run, or warn and try again at the "
        "next one. The last one's error always ends the run.", choices=("stop", "continue"))


@dataclass(frozen=True, slots=True)
class Log:
    folder: str = setting("runs/latest", "Folder for steps.jsonl, settings.toml and summary.json; latest is a link to "
        "the newest run's folder.", common=True)
    every: int = setting(1, "Steps between printed lines if the output is no terminal.", least=1, most=MAX_STEPS)
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
        """Return the settings as TOML for `load_settings`, each field below its help text."""
        lines: list[str] = []
        for known in known_settings().values():
            section, key = known.name.split(".")
            if f"[{section}]" not in lines:
                lines += ["", f"[{section}]"]
            lines += [f"# {known.meaning}", f"{key} = {toml_value(self.value(known.name))}"]
        return "\n".join(lines[1:]) + "\n"


def load_settings(path: str | Path | None, overrides: Mapping[str, str]) -> Settings:
    """Read the file and apply the overrides ("section.field" -> text); `checks` are not run."""
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


def num_training(settings: Settings, world: int) -> int:
    """Return the number of ranks that train; the ranks after them only serve."""
    return world - settings.attention.dedicated


def num_roles(settings: Settings) -> int:
    """Return the roles of dedicated servers in plans, over all tensor-parallel indices."""
    return settings.attention.roles or settings.attention.dedicated


def on_fewer_ranks(settings: Settings) -> Settings | None:
    """Return the same batch on the most data ranks below today's that share it equally; None if there are none."""
    group = settings.parallel.tensor * settings.parallel.pipeline
    data = num_training(settings, settings.run.ranks) // group
    tokens = data * settings.batch.tokens_per_rank
    fewer = next((fewer for fewer in range(data - 1, 0, -1) if tokens % (2 * fewer) == 0), 0)  # 2: ping and pong
    return settings.with_values({"run.ranks": fewer * group + settings.attention.dedicated,
                                 "batch.tokens_per_rank": tokens // fewer}) if fewer else None


@cache
def known_settings() -> Mapping[str, Known]:
    """Return the declaration of every field, by "section.field"."""
    declared: list[tuple[str, Any]] = [(f"{section}.{one.name}", one) for section, values in
                                       Settings().sections().items() for one in fields(values)]
    return {name: Known(name, type(one.default), one.default, **one.metadata) for name, one in declared}


def unknown_setting(what: str, name: str) -> ValueError:
    """Return an error that suggests the same field in another section, else a similar name."""
    names = list(known_settings())
    key = name.rpartition(".")[2]
    near = [full for full in names if full.partition(".")[2] == key] or get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "distca train --show-settings lists them all"
    return UserError(f"{what} is unknown; {hint}")


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
