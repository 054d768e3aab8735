"""Bytes that a GPU holds at its fullest moment.

Weights stay in bf16 on every rank of a stage; the float32 master copy and Adam's moments are sharded over its data
ranks. Float32 gradients are scattered as they come where a step is one micro-batch, and gathered up whole where there
are more. Activations are kept from forward to backward, without recomputation, and so are the keys that a
context-parallel group gathers. Exchange buffers live for one layer, two at a time under ping-pong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.work import activation_bytes
from distca.planning.pipeline_ticks import Ticks
from distca.simulate.costs import ADAM_BYTES, Costs
from distca.simulate.setting import Setting
from distca.spec import BF16_BYTES, FLOAT32_BYTES


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


def state_bytes(setting: Setting, costs: Costs) -> np.ndarray:
    """[stages] weights, gradients and optimizer of one GPU."""
    parameters = np.array([costs.stage_parameters(stage, setting.pp) for stage in range(setting.pp)])
    gradients = FLOAT32_BYTES / (setting.num_data if setting.num_micro_batches == 1 else 1)
    return parameters * (BF16_BYTES + gradients + ADAM_BYTES / setting.num_data)


def peak_live(ticks: Ticks, tokens: np.ndarray) -> np.ndarray:
    """[stages, data ranks] most tokens alive at once, for [micro-batches, data ranks] tokens."""
    number, active = ticks.micro_batch, ticks.micro_batch >= 0
    change = np.where(active, np.where(ticks.backward, -1, 1), 0)[:, :, None] * tokens[number]  # [ticks, stages, ranks]
    return np.cumsum(change, axis=0).max(axis=0)


def memory(
    setting: Setting, costs: Costs, live_tokens: np.ndarray, *, live_gathered: np.ndarray | None = None,
    buffers: np.ndarray | None = None,
) -> Memory:
    """`live_tokens` and `live_gathered` are [stages, data ranks] tokens alive at the peak, own and gathered."""
    ranks = setting.num_pool
    layers = setting.layers_per_stage
    own = live_tokens.ravel().astype(np.float64)
    gathered = np.zeros(ranks) if live_gathered is None else live_gathered.ravel().astype(np.float64)
    return Memory(
        np.repeat(state_bytes(setting, costs), setting.num_data),
        layers * activation_bytes(own, setting.model, setting.tp),
        layers * gathered * setting.model.kv_token_bytes(setting.tp),
        np.zeros(ranks) if buffers is None else buffers,
    )


def check_holds_model(setting: Setting, costs: Costs) -> None:
    """Refuse a cluster whose GPUs cannot even hold the model's share."""
    needed, there = float(state_bytes(setting, costs).max()), setting.cluster.memory_bytes
    if needed >= there:
        raise ValueError(
            f"cluster {setting.cluster.name!r} cannot hold {setting.model.name!r}: weights, gradients and optimizer "
            f"need {needed / 1e9:.0f} GB of each GPU's {there / 1e9:.0f} GB; give more --gpus, or a larger "
            "--tp or --pp")


def check_holds_step(setting: Setting, costs: Costs) -> None:
    """Refuse a step whose activations no schedule could hold: equal tokens, as few micro-batches alive as 1F1B has."""
    alive = setting.tokens_per_rank * min(setting.pp, setting.num_micro_batches)
    if alive > max_live_tokens(setting, costs):
        raise ValueError(
            f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs of "
            f"{setting.cluster.memory_bytes / 1e9:.0f} GB: {alive} tokens of activations are alive on each and "
            f"{max_live_tokens(setting, costs):.0f} fit; give fewer --sequences or a shorter --context, more "
            "--gpus, or a larger --tp")


def max_live_tokens(setting: Setting, costs: Costs) -> float:
    """Tokens of activations that fit a GPU of the fullest stage beside its states."""
    room = setting.cluster.memory_bytes - float(state_bytes(setting, costs).max())
    return room / (setting.layers_per_stage * float(activation_bytes(1, setting.model, setting.tp)))
