"""Bytes that a GPU holds at its fullest moment.

Weights stay in bf16 on every rank of a stage; the float32 master copy and Adam's moments are sharded over its data
ranks. Float32 gradients are scattered as they come where a step is one micro-batch, and gathered up whole where there
are more. Activations are kept from forward to backward, without recomputation, and so are the keys that a
context-parallel group gathers. Exchange buffers live for one layer, two at a time under ping-pong. A dedicated server
has nothing but buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.work import activation_bytes
from distca.planning.pipeline_schedule import Ticks
from distca.simulate.costs import ADAM_BYTES, Costs
from distca.simulate.setting import Setting
from distca.spec import BF16_BYTES, FLOAT32_BYTES
from distca.validation import UserError


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes per pool rank, each on every one of its GPUs."""

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
    """Of a step with [micro-batches, data ranks] tokens, whose groups of `gather_ranks` data ranks share their keys."""
    num_data, depth = tokens.shape[1], np.array(layers)[:, None]  # [stages, 1]
    held = np.zeros(len(layers) * num_data) if buffers is None else buffers
    states = np.broadcast_to(state_bytes(costs, layers, num_data, len(tokens))[:, None], (len(layers), num_data))
    live = depth * activation_bytes(peak_live(ticks, tokens).astype(np.float64), costs.model, costs.tp)
    gathered = np.zeros_like(live)
    if gather_ranks > 1:
        gathered = depth * peak_live(ticks, group_tokens(tokens, gather_ranks)) * costs.model.kv_token_bytes(costs.tp)
    of_ranks = [np.append(part.ravel(), np.zeros(len(held) - part.size)) for part in (states, live, gathered)]
    return Memory(of_ranks[0], of_ranks[1], of_ranks[2], held)


def state_bytes(costs: Costs, layers: Sequence[int], num_data: int, num_micro_batches: int) -> np.ndarray:
    """[stages] weights, gradients and optimizer of one GPU."""
    gradients = FLOAT32_BYTES / (num_data if num_micro_batches == 1 else 1)
    return costs.stage_parameters(layers) * (BF16_BYTES + gradients + ADAM_BYTES / num_data)


def peak_live(ticks: Ticks, tokens: np.ndarray) -> np.ndarray:
    """[stages, data ranks] most tokens alive at once, for [micro-batches, data ranks] tokens."""
    change = np.where(ticks.active, np.where(ticks.backward, -1, 1), 0)[:, :, None] * tokens[ticks.micro_batch]
    return np.cumsum(change, axis=0).max(axis=0)                 # [ticks, stages, data ranks] -> its peak


def group_tokens(tokens: np.ndarray, gather_ranks: int) -> np.ndarray:
    """[micro-batches, data ranks] tokens of the whole group of each rank."""
    return np.repeat(tokens.reshape(len(tokens), -1, gather_ranks).sum(axis=2), gather_ranks, axis=1)


def check_holds_model(setting: Setting, costs: Costs) -> None:
    """Refuse a cluster whose GPUs cannot even hold the model's share."""
    needed, there = float(_states(setting, costs).max()), setting.cluster.memory_bytes
    if needed >= there:
        raise UserError(
            f"cluster {setting.cluster.name!r} cannot hold {setting.model.name!r}: weights, gradients and optimizer "
            f"need {needed / 1e9:.0f} GB of each GPU's {there / 1e9:.0f} GB; give more --gpus, or a larger "
            "--tp or --pp")


def check_holds_step(setting: Setting, costs: Costs) -> None:
    """Refuse a step whose activations no schedule could hold: equal tokens, as few micro-batches alive as 1F1B has."""
    stages_behind = setting.pp - np.arange(setting.pp)
    alive = setting.tokens_per_rank * np.minimum(stages_behind, setting.num_micro_batches)
    room = max_live_tokens(setting, costs)
    tightest = int((room - alive).argmin())
    if alive[tightest] > room[tightest]:
        raise UserError(
            f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs of "
            f"{setting.cluster.memory_bytes / 1e9:.0f} GB: {alive[tightest]} tokens of activations are alive on each "
            f"and {room[tightest]:.0f} fit; give fewer --sequences or a shorter --context, more "
            "--gpus, or a larger --tp")


def max_live_tokens(setting: Setting, costs: Costs) -> np.ndarray:
    """[stages] tokens of activations that fit a GPU beside its states."""
    room = setting.cluster.memory_bytes - _states(setting, costs)
    return room / (np.array(setting.layers) * float(activation_bytes(1, setting.model, setting.tp)))


def _states(setting: Setting, costs: Costs) -> np.ndarray:
    return state_bytes(costs, setting.layers, setting.num_data, setting.num_micro_batches)
