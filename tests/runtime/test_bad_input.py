"""What does not fit is refused before anything is sent: the message names what was given, what fits and what to do."""

from typing import Any, Never

import numpy as np
import pytest
import torch

from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import tasks_at_home
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack_ping_pong
from tests.support.attention import on_fake_ranks, qkv_of, row_index
from tests.support.plans import misplaced_plan

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
LAYOUT = layout_from_rows([[10], [6]])
PLAN = misplaced_plan(LAYOUT, 2, MODEL)


class Refusing(LoopbackTransport):
    """A rank of two whose bad input must be refused before the other one is needed."""

    def exchange(self, *args: Any) -> Never:
        raise AssertionError("something was sent")

    def gather(self, *args: Any) -> Never:
        raise AssertionError("something was sent")


def attend(**options: Any) -> CoreAttention:
    return CoreAttention(transport=Refusing(LoopbackWorld(2), 0), **options)


def qkv(q: tuple[int, ...] = (10, 4, 8), k: tuple[int, ...] = (10, 2, 8), v: tuple[int, ...] = (10, 2, 8),
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float64,) * 3,
        devices: tuple[str, str, str] = ("cpu",) * 3) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, device in zip((q, k, v), dtypes, devices, strict=True)]


@pytest.mark.parametrize(("wrong", "named"), [
    ({"q": (10, 32)}, r"q has shape \(10, 32\)"),
    ({"q": (1, 10, 4, 8)}, r"q has shape \(1, 10, 4, 8\)"),
    ({"k": (10, 16)}, r"k \(10, 16\)"),
    ({"v": (10, 16)}, r"v \(10, 16\)"),
    ({"k": (10, 4, 8)}, r"k \(10, 4, 8\), v \(10, 2, 8\)"),
    ({"k": (10, 2, 4), "v": (10, 2, 4)}, r"k \(10, 2, 4\)"),
])
def test_shapes(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named + r".*give q \[tokens, heads, dim\], k \[tokens, kv_heads, dim\], v "):
        attend()(*qkv_of(qkv(**wrong)), PLAN)


def test_keys_of_other_tokens() -> None:
    with pytest.raises(ValueError, match="rank 0 has keys of 9 tokens but the plan's layout puts 10 there; pass the "
                                         "keys and values of just these"):
        attend()(*qkv_of(qkv(k=(9, 2, 8), v=(9, 2, 8))), PLAN)
    layout = pack_ping_pong([80], ranks=2)[1].layout             # its queries read 20 tokens of ping on each rank
    plan = Plan(layout, tasks_at_home(layout), np.ones(2), 0.0, MODEL)
    with pytest.raises(ValueError, match="keys of 20 tokens but the plan's layout puts 20 and 20 that are keys only"):
        attend()(*qkv_of(qkv(q=(20, 4, 8), k=(20, 2, 8), v=(20, 2, 8))), plan)


@pytest.mark.parametrize("kv_heads", [3, 0, 8])
def test_heads_that_kv_heads_do_not_divide(kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"q has 4 heads and k, v have {kv_heads}; give a number of heads"):
        attend()(*qkv_of(qkv(k=(10, kv_heads, 8), v=(10, kv_heads, 8))), PLAN)


def test_mixed_dtypes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match=r"q is torch.float32, k torch.bfloat16, v torch.float32; convert them to one"):
        attend()(*qkv_of(qkv(dtypes=dtypes)), PLAN)


def test_mixed_devices() -> None:
    with pytest.raises(ValueError, match="q is on cpu, k on cpu, v on meta; move them to one device"):
        attend()(*qkv_of(qkv(devices=("cpu", "cpu", "meta"))), PLAN)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_plan_for_another_number_of_ranks(servers: int) -> None:
    layout = layout_from_rows([[10]] * servers)
    with pytest.raises(ValueError, match=rf"the plan is for {servers} servers but the group has 2 ranks; plan with"):
        attend()(*qkv_of(qkv()), balance(layout, MODEL))


def test_a_plan_for_another_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="rank 0 has 9 tokens but the plan's layout puts 10 there; pass this rank"):
        attend()(*qkv_of(qkv(q=(9, 4, 8), k=(9, 2, 8), v=(9, 2, 8))), PLAN)


def test_a_row_on_a_dedicated_rank() -> None:
    transport = Refusing(LoopbackWorld(3), 2)
    plan = misplaced_plan(LAYOUT, 3, MODEL)
    with pytest.raises(ValueError, match="rank 2 has 10 tokens but the plan's layout puts 0 there"):
        CoreAttention(transport=transport)(*qkv_of(qkv()), plan)


def test_an_unknown_state() -> None:
    with pytest.raises(ValueError, match="state is 'remember'; choose one of: resend, keep"):
        attend(state="remember")


def run(**options: Any) -> list[torch.Tensor]:
    def body(attend: CoreAttention) -> torch.Tensor:
        rows = [x[:len(row_index(LAYOUT, attend.transport.rank))] for x in qkv(dtypes=(options["dtype"],) * 3)]
        return attend(*qkv_of(rows), PLAN, **options.get("arguments", {}))

    return on_fake_ranks(PLAN, body, kernel=options.get("kernel", "auto"))


def test_an_unknown_kernel() -> None:
    names = "hopper, fa4, varlen, sdpa, dense"
    with pytest.raises(ValueError, match=f"kernel='flash9' is unknown; give auto or one of {names}"):
        run(kernel="flash9", dtype=torch.float64)


@pytest.mark.parametrize("kernel", ["fa4", "varlen"])
def test_a_kernel_that_does_not_run_here(kernel: str) -> None:
    """float64 on a CPU fits neither, with or without the library it needs."""
    with pytest.raises(ValueError, match=rf"kernel='{kernel}' cannot run here: .*; or give kernel='auto'"):
        run(kernel=kernel, dtype=torch.float64)


def test_tensors_that_are_not_numbers_of_the_right_kind() -> None:
    with pytest.raises(ValueError, match=r"no kernel takes torch.int64 on cpu: .*floating-point"):
        run(dtype=torch.int64)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_tokens(window: int) -> None:
    with pytest.raises(ValueError, match=f"window={window}; give a positive number"):
        run(dtype=torch.float64, arguments={"window": window})


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"torch.distributed is not initialized; call torch.distributed.init_process_"):
        CoreAttention()


def test_refusals_leave_the_group_usable() -> None:
    """A rank's bad input is refused locally; the next good call works."""

    def body(attend: CoreAttention) -> torch.Size:
        tokens = len(row_index(LAYOUT, attend.transport.rank))
        with pytest.raises(ValueError, match="tokens"):
            attend(*qkv_of(qkv(q=(99, 4, 8), k=(99, 2, 8), v=(99, 2, 8))), PLAN)
        return attend(*qkv_of(x[:tokens] for x in qkv()), PLAN).shape

    assert on_fake_ranks(PLAN, body) == [(10, 4, 8), (6, 4, 8)]
