"""Run an example of a trainer that takes GPUs for granted on CPU ranks: `on_cpu.py {torchtitan|megatron} script …`.

Stands in for the GPU's names, clocks, memory and random state. Nothing of attention, sharding, pipelining or
optimization is replaced.
"""

import runpy
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def torchtitan() -> None:
    from torch.distributed.fsdp import FSDPModule

    cpu: Any = torch.cpu
    sharded: Any = FSDPModule
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda device=None: {}
    cpu.current_device = lambda: 0
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    divide = sharded.set_gradient_divide_factor

    def sum_unscaled(module: Any, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)           # gloo cannot scale while it reduces

    sharded.set_gradient_divide_factor = sum_unscaled


def megatron() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    start, configure = dist.init_process_group, TransformerConfig.__init__
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    groups: Any = dist
    cuda.current_device = lambda: "cpu"
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.current_stream = lambda *_: None                        # 0.19 asks for it and does not use it here
    tensor.cuda = module.cuda = lambda self, *_: self
    groups.init_process_group = lambda backend: start("gloo")
    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    TransformerConfig.__init__ = lambda self, **about: configure(self, use_cpu_initialization=True, **about)


if __name__ == "__main__":
    framework, *sys.argv = sys.argv[1:]
    {"torchtitan": torchtitan, "megatron": megatron}[framework]()
    runpy.run_path(sys.argv[0], run_name="__main__")
