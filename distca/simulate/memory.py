"""Memory of a simulated step: its peak on every GPU, and what to refuse because it cannot fit.

Weights stay in bf16 on every rank of a stage; the float32 master copy and Adam's moments are sharded over its data
ranks. Float32 gradients are sharded too if a step is one micro-batch, and whole otherwise. What a layer keeps for
backward depends on what backward recomputes (`cost.work.activation_bytes`). A layer that recomputes has all its
activations while its backward runs, and until its dW if that is a unit of its own. Offloading leaves two layers on the
GPU: the one being copied and the one in use. Keys that a context-parallel group gathers are kept or offloaded too.
Exchange buffers live for one layer, two at a time under ping-pong. A dedicated server has only buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.cost.work import activation_bytes
from distca.planning.orders import one_forward_one_backward
from distca.planning.schedule import Ticks
from distca.simulate.costs import Costs
from distca.simulate.setting import LEAST_BYTES, Setting
from distca.spec import BF16_BYTES, FLOAT32_BYTES
from distca.validation import UserError

ADAM_BYTES = 12             # float32 master weight and two moments of a parameter


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes on each GPU of every pool rank."""

    states: np.ndarray        # [ranks] weights, gradients, optimizer
    activations: np.ndarray   # [ranks]
    gathered_kv: np.ndarray   # [ranks]
    buffers: np.ndarray       # [ranks]

    @property
    def total(self) -> np.ndarray:
        return self.states + self.activations + self.gathered_kv + self.buffers

    @property
    def peak(self) -> float:
        return float(self.total.max())


def memory(
    costs: Costs, layers: Sequence[int], ticks: Ticks, tokens: np.ndarray, *, gather_ranks: int = 1,
    buffers: np.ndarray | None = None,
) -> Memory:
    """Memory of a step with [micro-batches, data ranks] tokens; groups of `gather_ranks` ranks gather their keys."""
    num_data, stages = tokens.shape[1], ticks.num_stages
    held = np.zeros(stages * num_data) if buffers is None else buffers
    of_stages = np.bincount(ticks.stage_of, weights=layers, minlength=stages)
    states = np.broadcast_to(state_bytes(costs, of_stages, num_data, len(tokens), ticks.spreads_head)[:, None],
                             (stages, num_data))
    live = _activations(costs, layers, ticks, tokens)
    gathered = np.zeros_like(live)
    if gather_ranks > 1:
        groups = np.repeat(tokens.reshape(len(tokens), -1, gather_ranks).sum(axis=2), gather_ranks, axis=1)
        kept = peak_live(ticks, layers, groups) if costs.recompute != "offload" else np.broadcast_to(
            2 * groups.max(axis=0), live.shape)
        gathered = kept * costs.model.kv_token_bytes(costs.tp)
    states, live, gathered = (np.append(part.ravel(), np.zeros(len(held) - part.size))  # dedicated servers follow
                              for part in (states, live, gathered))
    return Memory(states, live, gathered, held)


def state_bytes(
    costs: Costs, layers: Sequence[int] | np.ndarray, num_data: int, num_micro_batches: int, spreads_head: bool = False
) -> np.ndarray:
    """[stages] bytes of weights, gradients and optimizer on one GPU; a head on all stages is sharded over them too."""
    gradients = FLOAT32_BYTES / (num_data if num_micro_batches == 1 else 1)
    parameters = costs.stage_parameters(layers, spreads_head)
    head = costs.model.hidden * costs.model.vocab / costs.tp * (1 - 1 / len(parameters)) if spreads_head else 0.0
    others = replace(costs, ep=1).stage_parameters(layers, spreads_head) - parameters  # sharded like the GPU's own
    sharded = ADAM_BYTES + FLOAT32_BYTES * (num_micro_batches == 1)
    return parameters * (BF16_BYTES + gradients) + (parameters - head) * (ADAM_BYTES / num_data) + (
        others * (sharded / num_data))


def _activations(costs: Costs, layers: Sequence[int], ticks: Ticks, tokens: np.ndarray) -> np.ndarray:
    """[stages, data ranks] peak bytes of activations, with those that a layer has while it is recomputed."""
    whole, kept = (float(activation_bytes(1, costs.model, costs.tp, one)) for one in ("none", costs.recompute))
    largest = tokens.max(axis=0)                                 # [data ranks] of a micro-batch
    if costs.recompute == "offload":
        return np.broadcast_to(largest * (2 * kept + whole), (ticks.num_stages, len(largest)))
    size = np.array(layers, dtype=np.float64)[:, None, None] * tokens
    return ticks.alive(kept * size, whole * size) + largest * (whole - kept)


def peak_live(ticks: Ticks, layers: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """[stages, data ranks] peak of tokens times layers whose activations are kept, for [micro-batches, data ranks]."""
    return ticks.alive(np.array(layers, dtype=np.float64)[:, None, None] * tokens)


def check_fits(setting: Setting, costs: Costs, remedy: str = "fewer --sequences, or more --gpus") -> None:
    """Refuse a step that does not fit with equal tokens per rank, the live micro-batches of 1F1B, and the least memory
    that its `recompute` allows."""
    (states, needed), there = least_bytes(setting, costs), setting.cluster.memory_bytes
    if needed <= there:
        return
    if states >= there:
        raise UserError(
            f"cluster {setting.cluster.name!r} cannot hold {setting.model.name!r} on {setting.gpus} GPUs: weights, "
            f"gradients and optimizer need {states / 1e9:.0f} GB of each GPU's {there / 1e9:.0f} GB; give {remedy}")
    how = "" if setting.recompute == "auto" else f" with --recompute {setting.recompute}"
    raise UserError(
        f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs{how}: each needs {needed / 1e9:.0f} "
        f"GB and has {there / 1e9:.0f} GB; give {remedy}")


def least_bytes(setting: Setting, costs: Costs) -> tuple[float, float]:
    """Return the bytes of a GPU's states, and all bytes in 1F1B with equal tokens and the last mode of the setting."""
    costs = replace(costs, tp=setting.tp, ep=setting.ep, recompute=setting.modes[-1])
    states = state_bytes(costs, setting.layers, setting.num_data, setting.num_micro_batches)
    ticks = one_forward_one_backward(setting.pp, setting.num_micro_batches)
    return float(states.max()), _kept(setting, costs, setting.layers, ticks)[1]


def fits(setting: Setting, costs: Costs, layers: Sequence[int], ticks: Ticks) -> bool:
    """Return whether a step of ours with equal tokens per rank keeps to the GPU's memory and to `setting.memory`."""
    alive, num_bytes = _kept(setting, costs, layers, ticks)
    return alive <= setting.max_alive and num_bytes <= setting.max_bytes


def check_memory(setting: Setting, costs: Costs, listed: Mapping[str, tuple[Ticks, Sequence[int]]]) -> None:
    """Refuse a `memory` to which none of our orders, which come with the layers of their parts, can keep."""
    if not setting.memory:
        return
    costs, in_bytes = replace(costs, recompute=setting.modes[-1]), setting.memory >= LEAST_BYTES
    kept = {name: _kept(setting, costs, layers, ticks)[in_bytes] for name, (ticks, layers) in listed.items()}
    least = min(kept, key=lambda name: kept[name])
    if kept[least] > setting.memory:
        model, tp = setting.model, setting.tp                    # exchanges need room too: two rows, there and back
        row = setting.tokens_per_rank * (2 * model.q_token_bytes(tp) + model.kv_token_bytes(tp))
        given, needed = (f"{value / 1e9:.1f}GB" if in_bytes else f"{value:g}"
                         for value in (setting.memory, kept[least] + (1e8 + 2 * row) * in_bytes))
        raise UserError(
            f"memory is {given} but every order of {setting.pp} stages and {setting.num_micro_batches} micro-batches "
            f"keeps more, {least!r} the least; give --memory {needed} or more")


def _kept(setting: Setting, costs: Costs, layers: Sequence[int], ticks: Ticks) -> tuple[float, float]:
    """Return the micro-batches that an order keeps alive, and the peak bytes with equal tokens per rank."""
    tokens = np.full((setting.num_micro_batches, setting.num_data), setting.tokens_per_rank)
    return float(ticks.peak_live().max()), memory(costs, layers, ticks, tokens).peak


def max_live_tokens(setting: Setting, costs: Costs) -> np.ndarray:
    """[stages] tokens of activations that fit a GPU beside its states."""
    room = setting.cluster.memory_bytes - state_bytes(costs, setting.layers, setting.num_data,
                                                      setting.num_micro_batches)
    if costs.recompute == "offload":
        return np.full(setting.pp, np.inf)
    return room / (np.array(setting.layers) * float(activation_bytes(1, setting.model, setting.tp, costs.recompute)))
