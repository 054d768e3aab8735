"""Head dims of 192, whose values have 128, and 256: tables with tiles of their own, and what is refused by name.

The kernels themselves are compared on a GPU, in test_kernel_gpu.py.
"""


import pytest
import torch

from distca.kernels import choose, kernel_named
from distca.kernels.hopper import buffers as hopper_buffers
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper import launch as hopper_launch
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.hopper.variants import TILES, Masks
from tests.support import hopper_accuracy as accuracy
from tests.support import hopper_walk

CPU = torch.device("cpu")


@pytest.mark.parametrize("places", [0, 10_000], ids=["scores again", "dS kept"])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("dim", "group"), [(128, 2), (192, 1), (256, 4)])
def test_every_pair_is_computed_once_in_tiles_of_wide_heads(
    dim: int, group: int, window: int | None, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, dK and dV, and dQ by itself, whose steps are not the tiles that its table counts in."""
    monkeypatch.setattr(hopper_buffers, "most_places", lambda device, place_bytes: places)
    monkeypatch.setattr(hopper, "run_forward", hopper_walk.launch_forward)
    monkeypatch.setattr(hopper, "run_backward", hopper_walk.launch_backward)
    assert dim == 128 or TILES[dim].dq_keys != TILES[dim].forward_keys
    for seed in range(4):
        rows = accuracy.random_rows(seed, 8, 300, 520, apart=bool(seed % 2))
        tensors = [x.double() for x in accuracy.random_inputs(300, 520, group, 1, dim, CPU, seed)]
        accuracy.assert_exact(accuracy.attend(HopperKernel(), tensors, rows, window), tensors, rows, window)


def test_the_cpu_takes_values_of_another_head_dim() -> None:
    assert choose("cpu", torch.float32, 192, value_dim=128).name == "sdpa"


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 192), (128, 64), (96, 96), (256, 128)])
def test_head_dims_without_tiles_are_refused_by_name(
    dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    values = "" if value_dim == dim else f" and that of values {value_dim}"
    refusal = f"head_dim is {dim}{values}; give 64, 128 or 256, or 192 with values of 128"
    assert HopperKernel().supports(torch.device("cuda"), torch.bfloat16, dim, value_dim=value_dim) == refusal
    q, v = (torch.Size((10, 2, size)) for size in (dim, value_dim))
    launches = hopper_launch.Launches(torch.device("cuda", 0), q, q, v, Masks(False, False), False, 132)
    with pytest.raises(ValueError, match=refusal):
        launches.forward(1, 0, False, *[(0, (1,))] * 3)
    with pytest.raises(ValueError, match=refusal):
        launches.backward(1, 0, (False, False, False), *[(0, (1,))] * 4)


@pytest.mark.parametrize("name", ["varlen", "fa4"])
def test_kernels_of_one_head_dim_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    reason = kernel_named(name).supports(torch.device("cuda"), torch.bfloat16, 192, value_dim=128)
    assert reason == ("head_dim is 192 and that of values 128, it takes one for both; use kernel='hopper', 'sdpa' or "
                      "'dense'")
