"""Choose device, dtype and threads for this machine, and refuse settings that it cannot run.

`check_machine` refuses, for example, a missing GPU, package or file. Like `check_settings`, it runs before any process
starts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distca.corpus.tokenizers import open_tokenizer
from distca.train.model.shape import DecoderShape, decoder_shape
from distca.train.run_log import each_run_its_own
from distca.train.settings import TOKENIZED, Settings
from distca.train.settings.checks import check_degrees
from distca.validation import UserError, errors_in, read_text, to_install

MAX_LOG_BYTES = 2**30  # limit of a steps.jsonl that a run continues

if TYPE_CHECKING:
    import torch


def check_machine(settings: Settings) -> None:
    """Raise a one-line UserError if this machine cannot run these settings."""
    _require_packages(settings)
    _check_files(settings)
    device = device_for(settings, local_rank=0)
    if settings.attention.transport == "symmetric" and device.type != "cuda":
        raise UserError("attention.transport is 'symmetric', the memory of GPUs, but the run is on a CPU; use 'c10d' "
                        "or 'auto'")
    compiles(settings, device)
    if settings.model.offload and device.type != "cuda":
        raise UserError(f"model.offload is {settings.model.offload:g} but this run is on cpu, where activations are "
                        "in host memory anyway; set it to 0")
    shape = _model(settings)
    if settings.attention.cost:
        from distca.train.batches import attention_time

        with errors_in("attention.cost", ValueError):
            attention_time(settings, shape.model)
    if settings.attention.kernel != "auto":
        from distca.kernels import choose

        with errors_in("attention.kernel", ValueError):
            for window in dict.fromkeys(shape.model.layer_windows):
                choose(device, dtype_for(settings, device), shape.model.head_dim, window, settings.attention.kernel)


def device_for(settings: Settings, local_rank: int) -> torch.device:
    """Return this rank's device; ranks share GPUs if there are fewer GPUs than ranks."""
    import torch

    kind = settings.run.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    elif kind == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is 'cuda' but torch finds no GPU here; set it to cpu or auto")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", local_rank % torch.cuda.device_count())


def dtype_for(settings: Settings, device: torch.device) -> torch.dtype:
    """Return the dtype of the layers on this device."""
    import torch

    automatic = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, automatic if settings.run.dtype == "auto" else settings.run.dtype)
    return dtype


def compiles(settings: Settings, device: torch.device) -> bool:
    """Return whether to compile segments; refuse model.compile "on" if the device has no compiler."""
    chosen = settings.model.compile
    if chosen == "off" or (chosen == "auto" and device.type != "cuda"):
        return False
    missing = _missing_compiler(device)
    if missing and chosen == "on":
        raise UserError(f"model.compile is 'on' but {missing}; or set it to off")
    if missing:
        logging.getLogger("distca").warning("segments are not compiled: %s", missing)
    return not missing


def _missing_compiler(device: torch.device) -> str:
    if device.type == "cuda":
        return "" if find_spec("triton") else "triton is not installed; run: pip install triton"
    found = any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
    return "" if found else "no C++ compiler (g++ or clang++) is on the PATH; install one"


def threads_for(settings: Settings, local_world: int, environ: Mapping[str, str]) -> int:
    """Return the CPU threads of a rank. srun already gives the number per task; otherwise ranks share the cores."""
    if settings.run.threads:
        return settings.run.threads
    if "SLURM_CPUS_PER_TASK" in environ and "SLURM_PROCID" in environ:
        return int(environ["SLURM_CPUS_PER_TASK"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world)


def _require_packages(settings: Settings) -> None:
    if find_spec("torch") is None:
        raise UserError(f"train needs torch, which is not installed; {to_install('torch', 'safetensors', 'xxhash')}")
    for package, name, value in (("tensorboard", "log.tensorboard", settings.log.tensorboard),
                                 ("wandb", "log.wandb", settings.log.wandb),
                                 ("safetensors", "model.load", settings.model.load),
                                 ("xxhash", "checkpoint.folder", settings.checkpoint.folder),
                                 ("nixl", "attention.links", settings.attention.links != "tcp" and "nixl"),
                                 ("xxhash", "data.cache", settings.data.is_cached and settings.data.cache)):
        if value and find_spec(package) is None:
            raise UserError(f"{name} is {json.dumps(value)} but {package} is not installed; "
                            f"{to_install(package)}")


def _check_files(settings: Settings) -> None:
    data = settings.data
    for one in data.sources():
        if one.path:
            _check_corpus("a source of data.mix" if data.mix else "data.path", one.path, one.kind, data.split)
    if settings.eval.path:
        _check_corpus("eval.path", settings.eval.path, data.kind_of(settings.eval.path), "")
    if not data.tokenizer and data.content == "text" and any(one.kind in TOKENIZED for one in data.sources()):
        tokenizer = Path(settings.model.load, "tokenizer.json")
        if settings.model.load and tokenizer.is_file():
            raise UserError(f"model.load is {settings.model.load!r}, which has a tokenizer of its own, but "
                            f"data.tokenizer is empty, so that texts would become bytes; set it to {str(tokenizer)!r}")
    if data.content == "chat":
        from distca.corpus.chat import load_chat_template

        load_chat_template(data.tokenizer)
    if settings.checkpoint.neighbour_every and not os.access("/dev/shm", os.W_OK):
        raise UserError(f"checkpoint.neighbour_every is {settings.checkpoint.neighbour_every} but /dev/shm, the memory "
                        "that keeps checkpoints, cannot be written here; set it to 0")
    log = Path(settings.log.folder)
    fresh = each_run_its_own(log)
    _check_writable("log.folder", settings.log.folder, log.parent if fresh else log)
    for name, folder in (("checkpoint.folder", settings.checkpoint.folder),
                         ("checkpoint.export", settings.checkpoint.export)):
        if folder:
            _check_writable(name, folder, Path(folder))
    if settings.checkpoint.export:
        from distca.train.checkpoint.export import check_target

        check_target(settings.checkpoint.export, "checkpoint.export")
    if not fresh and (log / "steps.jsonl").exists():
        read_text(log / "steps.jsonl", MAX_LOG_BYTES)


def _check_corpus(name: str, path: str, source: str, split: str) -> None:
    if source == "megatron":
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        for file in (f"{prefix}.idx", f"{prefix}.bin"):
            if not Path(file).is_file():
                raise UserError(f"{name} is {path!r} but {file} is no file; a Megatron dataset has both")
    elif not Path(path).exists():
        raise UserError(f"{name} is {path!r}, which is no file or folder; check the path")
    elif source == "table":
        from distca.corpus.tables import pyarrow, table_files

        pyarrow()
        table_files(path, split=split, split_option="data.split" if name == "data.path" else "")


def _check_writable(name: str, folder: str, path: Path) -> None:
    """Refuse a path if no file can be created in it or, if it is missing, in its nearest existing parent."""
    path = path.absolute()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):
            return
    except (OSError, ValueError):
        raise UserError(f"{name} is {folder!r}, where no file can be created; name another folder") from None


def _model(settings: Settings) -> DecoderShape:
    """Return the model's shape; check its vocabulary, its parallel degrees and its weight files."""
    from distca.train.model.huggingface import check_weight_files

    chosen = settings.model
    vocab = 1
    if settings.data.tokenizer:
        has_texts = settings.data.content == "text" and {one.kind for one in settings.data.sources()} != {"megatron"}
        vocab = open_tokenizer(settings.data.tokenizer, "data.tokenizer", special_tokens=has_texts).vocab
    if chosen.load and not (Path(chosen.load) / "config.json").is_file():
        raise UserError(f"model.load is {chosen.load!r} but {Path(chosen.load) / 'config.json'} is no file; name the "
                        "folder of a Hugging Face model")
    source = f"model.load is {chosen.load!r}" if chosen.load else f"model.config is {chosen.config!r}"
    with errors_in(source, ValueError) if chosen.load or chosen.config else nullcontext():
        shape = decoder_shape(chosen)
    decoder_shape(chosen, vocab)
    check_degrees(settings, shape)
    if chosen.load:
        check_weight_files(chosen.load)
    return shape


class MemoryKills(NamedTuple):
    """Count of out-of-memory kills in this process's cgroup, to explain a SIGKILL, which itself gives no reason."""

    file: Path | None            # None if no cgroup counts them
    before: int

    @classmethod
    def of(cls, root: Path) -> MemoryKills:
        """Read the count of the nearest cgroup at or above this process's that has one."""
        try:
            lines = (root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return cls(None, 0)
        for _, controllers, path in (line.split(":", 2) for line in lines):
            if controllers and "memory" not in controllers.split(","):  # v2 has none: 0::/path
                continue
            top, name = (("sys/fs/cgroup/memory", "memory.oom_control") if controllers else
                         ("sys/fs/cgroup", "memory.events"))
            own = root / top / path.lstrip("/")
            for folder in (own, *own.parents):
                if (folder / name).is_file():
                    return cls(folder / name, _oom_kills(folder / name))
                if folder == root / top:
                    break
        return cls(None, 0)

    def risen(self) -> bool:
        return self.file is not None and _oom_kills(self.file) > self.before


def _oom_kills(file: Path) -> int:
    try:
        return sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0
