"""The driver layer: what a launch hands over, which libraries and cubins are found, what a failure says.

Without a GPU the driver is played by C callbacks, so that every value crosses ctypes as it would on the way to libcuda.
"""

import ctypes
import itertools
import logging
import os
import struct
import threading
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p, string_at
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca.kernels.hopper import driver as cuda_driver
from distca.kernels.hopper.driver import Function, Launch, TensorMap, compile_cubin, load_functions, nvrtc, tensor_map

Pointer = Any  # what POINTER(...) makes has no name that annotations could use
LAUNCH = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_void_p), c_void_p)
ENCODE = CFUNCTYPE(
    c_int, c_void_p, c_int, c_uint32, c_void_p, POINTER(ctypes.c_uint64), POINTER(ctypes.c_uint64), POINTER(c_uint32),
    POINTER(c_uint32), *[c_int] * 4,
)


@CFUNCTYPE(c_int, c_int, POINTER(c_char_p))
def error_string(code: int, text: Pointer) -> int:
    text[0] = b"made up"
    return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A driver without functions yet, in a thread that has a context."""
    fake = SimpleNamespace(cuGetErrorString=error_string)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_driver, "_bind_context", lambda: None)
    cuda_driver._encoded.cache_clear()
    yield fake
    cuda_driver._encoded.cache_clear()


def filled_map(byte: int) -> TensorMap:
    made = TensorMap()
    ctypes.memset(made.address, byte, 128)
    return made


def test_tensor_maps_are_aligned_and_apart() -> None:
    maps = [TensorMap() for _ in range(50)]
    begins = sorted(x.address for x in maps)
    assert all(begin % 64 == 0 for begin in begins)
    assert all(b - a >= 128 for a, b in itertools.pairwise(begins))
    for x in maps:
        inside = x.address - ctypes.addressof(x._storage)
        assert 0 <= inside <= ctypes.sizeof(x._storage) - 128


@given(i=st.integers(-(2**31), 2**31 - 1), j=st.integers(-(2**63), 2**63 - 1), pointer=st.integers(0, 2**64 - 1),
       x=st.floats(width=32, allow_nan=False), byte=st.integers(0, 255))
def test_a_launch_hands_over_what_it_is_called_with(i: int, j: int, pointer: int, x: float, byte: int) -> None:
    seen = []

    @LAUNCH
    def run(config: int, handle: int, parameters: Pointer, extra: None) -> int:
        sizes = struct.unpack("7I4xQQI4x", string_at(config, 56))  # CUlaunchConfig as a C compiler lays it out
        kinds: tuple[Any, ...] = (c_int32, c_void_p, c_float)
        values = [kind.from_address(parameters[n]).value for n, kind in enumerate(kinds)]
        values += [string_at(parameters[3], 128), c_int64.from_address(parameters[4]).value]
        seen.append((handle, sizes, extra, values))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=run))
        patch.setattr(cuda_driver, "_bind_context", lambda: None)
        function = Function("k", "iPfTq", 384, 200_000, c_void_p(2**47 + 8))  # padded twice
        launch = function.launch(132, 2**47, filled_map(byte))
        other = function.launch(1, 3, filled_map(7))
        launch(1, 2, 3.0, 5)
        other(6, 7, 8.0, 9)
        seen.clear()
        launch(i, pointer, x, j)
    values = [i, pointer or None, x, bytes([byte]) * 128, j]
    assert seen == [(2**47 + 8, (132, 1, 1, 384, 1, 1, 200_000, 2**47, 0, 0), None, values)]


@pytest.mark.parametrize("values", [(2**31, 0), (0, -1), (0, 2**32), (1,), (1, 2, 3), (1.5, 2)])
def test_numbers_that_do_not_fit_are_refused(driver: SimpleNamespace, values: tuple[float, ...]) -> None:
    driver.cuLaunchKernelEx = LAUNCH(lambda *_: 0)
    with pytest.raises(struct.error):
        Launch(Function("k", "iI", 32, 0, c_void_p(1)), 1, 0)(*values)


def test_a_failing_call_is_named_with_the_drivers_words(driver: SimpleNamespace) -> None:
    driver.cuLaunchKernelEx = LAUNCH(lambda *_: 701)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx of k with grid 3 and block 64 .*made up.*701"):
        Launch(Function("k", "", 64, 0, c_void_p(1)), 3, 0)()


def test_tensor_map_describes_swizzled_bf16_and_is_kept(driver: SimpleNamespace) -> None:
    seen: list[tuple[Any, ...]] = []

    @ENCODE
    def encode(out: int, kind: int, rank: int, pointer: int, sizes: Pointer, strides: Pointer, box: Pointer,
               steps: Pointer, interleave: int, swizzle: int, promotion: int, fill: int) -> int:
        ctypes.memset(out, 9, 128)
        seen.append((out % 64, kind, pointer, sizes[:rank], strides[: rank - 1], box[:rank], steps[:rank]))
        seen.append((interleave, swizzle, promotion, fill))
        return 0

    driver.cuTensorMapEncodeTiled = encode
    made = tensor_map(2**40, [128, 8, 5000], [256, 2048], [64, 1, 128])
    assert string_at(made.address, 128) == b"\x09" * 128
    bfloat16, none, swizzle_128_bytes, promote_256_bytes, zeros = 9, 0, 3, 3, 0  # as cuda.h numbers them
    assert seen == [
        (0, bfloat16, 2**40, [128, 8, 5000], [256, 2048], [64, 1, 128], [1, 1, 1]),
        (none, swizzle_128_bytes, promote_256_bytes, zeros),
    ]
    assert tensor_map(2**40, (128, 8, 5000), (256, 2048), (64, 1, 128)) is made
    assert tensor_map(2**40, (128, 8, 5001), (256, 2048), (64, 1, 128)) is not made


def test_a_refused_tensor_map_says_its_shape(driver: SimpleNamespace) -> None:
    driver.cuTensorMapEncodeTiled = ENCODE(lambda *_: 1)
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled\(pointer=0x100, sizes=\(64, 3\).*made up"):
        tensor_map(256, (64, 3), (128,), (64, 8))


def test_functions_get_their_shared_memory(driver: SimpleNamespace) -> None:
    image, granted = [], []

    @CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p)
    def load(out: Pointer, data: int) -> int:
        image.append(string_at(data, 6))
        out[0] = 11
        return 0

    @CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p, c_char_p)
    def get_function(out: Pointer, module: int, name: bytes) -> int:
        out[0] = 12
        return 0 if (module, name) == (11, b"forward") else 500

    @CFUNCTYPE(c_int, c_void_p, c_int, c_int)
    def set_attribute(handle: int, attribute: int, value: int) -> int:
        granted.append((handle, attribute, value))
        return 0 if value <= 232_448 else 1

    driver.cuModuleLoadData, driver.cuModuleGetFunction = load, get_function
    driver.cuFuncSetAttribute, cubin = set_attribute, b"\x7fELF\x00\x01"
    [forward] = load_functions(cubin, {"forward": ("Pi", 128, 230_000)})
    assert image == [cubin] and granted == [(12, 8, 230_000)]
    assert (forward.name, forward.types, forward.num_threads, forward.handle.value) == ("forward", "Pi", 128, 12)
    with pytest.raises(RuntimeError, match="cuModuleGetFunction of backward failed: made up"):
        load_functions(cubin, {"backward": ("", 128, 0)})
    with pytest.raises(RuntimeError, match="300000 bytes of dynamic shared memory"):
        load_functions(cubin, {"forward": ("", 128, 300_000)})


@pytest.mark.parametrize("context_of", [None, 2, 1], ids=["no context", "its context", "another device's"])
def test_a_thread_gets_its_devices_context_once(monkeypatch: pytest.MonkeyPatch, context_of: int | None) -> None:
    calls: list[str | int] = []

    @CFUNCTYPE(c_int, POINTER(c_void_p))
    def get_current(out: Pointer) -> int:
        calls.append("get")
        out[0] = None if context_of is None else 5
        return 0

    @CFUNCTYPE(c_int, POINTER(c_int))
    def device_of_context(out: Pointer) -> int:
        out[0] = 40 + (context_of or 0)
        return 0

    @CFUNCTYPE(c_int, POINTER(c_int), c_int)
    def get_device(out: Pointer, index: int) -> int:
        out[0] = index + 40
        return 0

    @CFUNCTYPE(c_int, POINTER(c_void_p), c_int)
    def retain(out: Pointer, device: int) -> int:
        out[0] = device + 100
        return 0

    @CFUNCTYPE(c_int, c_void_p)
    def set_current(context: int) -> int:
        calls.append(context)
        return 0

    fake = SimpleNamespace(cuCtxGetCurrent=get_current, cuDeviceGet=get_device, cuDevicePrimaryCtxRetain=retain,
                           cuCtxGetDevice=device_of_context, cuCtxSetCurrent=set_current)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake)
    current = [2]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    def twice() -> None:
        cuda_driver._bind_context()
        cuda_driver._bind_context()

    def of_two_devices() -> None:
        for current[0] in (3, 3, 4, 3):
            cuda_driver._bind_context()

    for target in (twice, twice, of_two_devices):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert calls == (["get", "get"] if context_of == 2 else ["get", 142, "get", 142]) + ["get", 143, "get", 144]


def test_options_name_the_architecture_and_sorted_defines() -> None:
    options = cuda_driver.compile_options({"WINDOW": 0, "HEAD_DIM": 128}, "sm_90a")
    assert "--gpu-architecture=sm_90a" in options and "-std=c++17" in options
    assert options[-2:] == ("-DHEAD_DIM=128", "-DWINDOW=0")
    assert options == cuda_driver.compile_options({"HEAD_DIM": 128, "WINDOW": 0}, "sm_90a")
    assert not any("fast_math" in option for option in options)


def test_missing_libraries_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "libnvrtc.so.99")
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.99") as caught:
        nvrtc(missing)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(RuntimeError, match=r"nvidia/cu99/lib/libnvrtc.so.99, .*cuda_nvrtc/lib.*, /usr/local/cuda"):
        nvrtc.__wrapped__()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="has no CUDA"):
        nvrtc.__wrapped__()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A compiler that only records, with its cubins kept below tmp_path."""
    calls = []

    def run_compiler(library: None, source: str, name: str, options: tuple[str, ...]) -> bytes:
        calls.append((source, name, *options))
        return f"cubin of {calls[-1]}".encode()

    monkeypatch.setattr(cuda_driver, "nvrtc", lambda: None)
    monkeypatch.setattr(cuda_driver, "nvrtc_version", lambda library: (13, 0))
    monkeypatch.setattr(cuda_driver, "run_compiler", run_compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cuda_driver._say_not_kept.cache_clear()
    return calls


def test_cubins_are_kept_by_all_that_they_depend_on(compiled: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                    tmp_path: Path) -> None:
    def of(source: str = "a", name: str = "k.cu", arch: str = "sm_90a", **defines: int) -> bytes:
        return compile_cubin(source, name, defines, arch)

    first = of(A=1)
    assert of(A=1) == first and len(compiled) == 1
    others = [of(source="b", A=1), of(name="l.cu", A=1), of(A=2), of(B=1), of(A=1, B=1), of(A=1, arch="sm_100a")]
    assert len(compiled) == 7 and len({first, *others}) == 7
    monkeypatch.setattr(cuda_driver, "nvrtc_version", lambda library: (13, 1))
    of(A=1)
    assert len(compiled) == 8
    kept = list((tmp_path / "cache" / "distca" / "cubin").iterdir())
    assert len(kept) == 8 and all(path.suffix == ".cubin" and len(path.stem) == 64 for path in kept)


def test_the_cache_is_in_the_home_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cuda_driver.cache_folder() == tmp_path / ".cache" / "distca" / "cubin"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cuda_driver.cache_folder() == tmp_path / "x" / "distca" / "cubin"


@pytest.mark.parametrize("obstacle", ["writable by others", "a link", "its parent"])
def test_a_cache_that_others_could_fill_is_not_used(compiled: list[Any], tmp_path: Path,
                                                    caplog: pytest.LogCaptureFixture, obstacle: str) -> None:
    first = compile_cubin("a", "k.cu", {})
    folder = tmp_path / "cache" / "distca" / "cubin"
    (kept,) = folder.iterdir()
    assert folder.stat().st_mode & 0o077 == 0                    # made for its owner alone
    kept.write_bytes(b"somebody else's code")
    if obstacle == "writable by others":
        folder.chmod(0o777)
    elif obstacle == "its parent":
        folder.parent.chmod(0o775)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO, logger="distca"):
        assert compile_cubin("a", "k.cu", {}) == first and len(compiled) == 2
    assert "not its owner's alone" in caplog.text


@pytest.mark.parametrize("obstacle", ["a file in the way", "a relative folder", "a disk that is full"])
def test_without_a_cache_folder_it_compiles_again_and_says_so_once(compiled: list[Any],
                                                                   monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                   caplog: pytest.LogCaptureFixture,
                                                                   obstacle: str) -> None:
    if obstacle == "a file in the way":
        (tmp_path / "cache").write_text("")
    elif obstacle == "a relative folder":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    else:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.INFO, logger="distca"):
        first, second = compile_cubin("a", "k.cu", {}), compile_cubin("a", "k.cu", {})
        compile_cubin("b", "k.cu", {})
    assert first == second and len(compiled) == 3
    assert len([r for r in caplog.records if "not kept" in r.getMessage()]) == 1
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file() and path.name != "cache"]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ctypes.CDLL:
    """NVRTC itself, where it is installed."""
    try:
        library = nvrtc()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return library


# One thread copies a box into shared memory by the tensor map; all threads read it back through the 128-byte swizzle.
COPY = r"""
struct alignas(64) TensorMap { char opaque[128]; };
extern "C" __global__ void __launch_bounds__(128, 1)
copy(const __grid_constant__ TensorMap map, unsigned short* out, int x, int y) {
  extern __shared__ __align__(1024) char shared[];
  unsigned box = (unsigned)__cvta_generic_to_shared(shared), barrier = box + ROWS * 128, done = 0;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(ROWS * 128) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(box), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
  }
  __syncthreads();
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier) : "memory");
  for (int i = threadIdx.x; i < ROWS * 64; i += 128) {
    int byte = i * 2, swizzled = byte ^ ((byte >> 7 & 7) << 4);
    out[i] = *(unsigned short*)(shared + swizzled);
  }
}
"""
HOPPER_ONLY = r"""
extern "C" __global__ void __launch_bounds__(384, 1) k(float* out) {
  if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 240; wgmma.fence.sync.aligned;" ::: "memory");
  out[threadIdx.x] = SCALE;
}
"""


def test_nvrtc_compiles_for_hopper_once(compiler: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_cubin(HOPPER_ONLY, "k.cu", {"SCALE": 3})
    assert cubin.startswith(b"\x7fELF") and b".text.k" in cubin
    assert compile_cubin(COPY, "copy.cu", {"ROWS": 16}).startswith(b"\x7fELF")
    monkeypatch.setattr(cuda_driver, "run_compiler", None)
    assert compile_cubin(HOPPER_ONLY, "k.cu", {"SCALE": 3}) == cubin


def test_what_the_compiler_says_reaches_the_user(compiler: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match=r'(?s)k\.cu does not compile.*identifier "SCALE" is undefined'):
        compile_cubin(HOPPER_ONLY, "k.cu", {})
    with pytest.raises(RuntimeError, match=r"wgmma.fence' not supported on .target 'sm_90'"):
        compile_cubin(HOPPER_ONLY, "k.cu", {"SCALE": 3}, arch="sm_90")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs an NVIDIA Hopper GPU"
)
def test_a_box_is_copied_from_two_threads(compiler: ctypes.CDLL) -> None:
    """Out of bounds the box holds zeros; a launch from a thread that torch has never used works alike."""
    rows, shared_bytes = 16, 16 * 128 + 8
    [function] = load_functions(compile_cubin(COPY, "copy.cu", {"ROWS": rows}), {"copy": ("TPii", 128, shared_bytes)})
    table = torch.randn(40, 128, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    outs = [torch.empty(rows, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    described = tensor_map(table.data_ptr(), (128, 40), (256,), (64, rows))

    def launch(i: int) -> None:
        function.launch(1, stream, described)(outs[i].data_ptr(), 64, (0, 32)[i])

    launch(0)
    thread = threading.Thread(target=launch, args=(1,))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], table[:16, 64:])
    assert torch.equal(outs[1], torch.cat([table[32:, 64:], torch.zeros_like(table[:8, 64:])]))
