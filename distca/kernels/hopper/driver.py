"""Compile CUDA C++ kernels with NVRTC at first use and launch them through the driver API, without a build step.

torch's CUDA wheels include libnvrtc and every driver includes libcuda, so a plain `pip install` is enough: no compiler,
no headers, no extension module. Compiling takes seconds, so cubins are cached in the user's cache folder. A launch is
one ctypes call with preallocated arguments, so it adds little host time to the driver's own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOOLKIT = Path("/usr/local/cuda")
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
TENSOR_MAPS_KEPT = 256

# Values of enums in cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_BFLOAT16, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _OUT_OF_BOUNDS_ZEROS = 9, 0, 3, 3, 0

_logger = logging.getLogger("distca")
_of_this_thread = threading.local()


@functools.cache
def nvrtc(path: str | None = None) -> ctypes.CDLL:
    """Load libnvrtc of torch's CUDA version, or the library at `path`."""
    candidates = [path] if path is not None else _nvrtc_candidates()
    for candidate in candidates:
        try:
            library = ctypes.CDLL(candidate)
            library.nvrtcGetErrorString.restype = c_char_p
            _load_builtins(library, [candidate, *candidates])
        except OSError:
            continue
        return library
    raise RuntimeError(f"libnvrtc cannot be loaded from {', '.join(candidates)}; pip install nvidia-cuda-nvrtc")


def _load_builtins(library: ctypes.CDLL, beside: Sequence[str]) -> None:
    """Preload NVRTC's builtins: it opens them by bare name, which fails in a wheel's folder unless they are loaded."""
    name = "libnvrtc-builtins.so.{}.{}".format(*nvrtc_version(library))
    for path in beside:
        try:
            ctypes.CDLL(str(Path(path).with_name(name)))
        except OSError:
            continue
        return
    raise FileNotFoundError(f"{name} is not beside {beside[0]}")


def _nvrtc_candidates() -> list[str]:
    """Return the bare name (already loaded, or on the system's path), then paths in the wheels and the toolkit."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} has no CUDA, so no libnvrtc; install a CUDA build of torch")
    major, wheels = torch.version.cuda.split(".")[0], Path(torch.__file__).parents[1] / "nvidia"
    name = f"libnvrtc.so.{major}"
    folders = (wheels / f"cu{major}" / "lib", wheels / "cuda_nvrtc" / "lib", TOOLKIT / "lib64", TOOLKIT / "lib")
    return [name, *(str(folder / name) for folder in folders)]


def compile_options(defines: Mapping[str, int], arch: str) -> tuple[str, ...]:
    """Return NVRTC's options; the order of `defines` does not matter."""
    macros = (f"-D{name}={int(value)}" for name, value in sorted(defines.items()))
    return (f"--gpu-architecture={arch}", "-std=c++17", "-lineinfo", "-default-device", *macros)


def compile_cubin(source: str, name: str, defines: Mapping[str, int], arch: str = "sm_90a") -> bytes:
    """Return the cubin of CUDA C++ source without includes; `name` appears in messages and line info."""
    library = nvrtc()
    options = compile_options(defines, arch)
    key = hashlib.sha256(repr((source, name, options, nvrtc_version(library))).encode()).hexdigest()
    try:
        return (private_folder(cache_folder()) / f"{key}.cubin").read_bytes()
    except OSError:
        cubin = run_compiler(library, source, name, options)
    try:
        _write_atomically(private_folder(cache_folder()) / f"{key}.cubin", cubin)
    except OSError as error:
        _say_not_kept(error.strerror or str(error))
    return cubin


def cache_folder() -> Path:
    """Return the folder that caches cubins; raise OSError if the user has no home."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise FileNotFoundError(f"cache folder {root} is no absolute path; set HOME or XDG_CACHE_HOME to one")
    return Path(root) / "distca" / "cubin"


def private_folder(folder: Path) -> Path:
    """Create the folder for its owner only if missing; raise OSError if other users could write code into it."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    for part in (folder, folder.parent):
        about = part.lstat()
        if stat.S_ISLNK(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"{part} is not its owner's alone, so that others could put code into "
                                  "it; remove it, or run chmod go-w on it")
    return folder


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        os.unlink(scratch)
        raise


@functools.cache
def _say_not_kept(reason: str) -> None:
    _logger.info("compiled CUDA kernels are not kept (%s); set XDG_CACHE_HOME to a folder that can be written", reason)


def nvrtc_version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _check_nvrtc(library, library.nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def run_compiler(library: ctypes.CDLL, source: str, name: str, options: Sequence[str]) -> bytes:
    """Run NVRTC once and return the cubin. Its remarks, for example on serialized wgmma, are logged as warnings."""
    program, size = c_void_p(), c_size_t()
    code = library.nvrtcCreateProgram(byref(program), source.encode(), name.encode(), 0, None, None)
    _check_nvrtc(library, code, "nvrtcCreateProgram")
    try:
        words = (c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), words)
        _check_nvrtc(library, library.nvrtcGetProgramLogSize(program, byref(size)), "nvrtcGetProgramLogSize")
        text = ctypes.create_string_buffer(max(1, size.value))
        _check_nvrtc(library, library.nvrtcGetProgramLog(program, text), "nvrtcGetProgramLog")
        log = text.value.decode(errors="replace").strip()
        if failed:
            reason = library.nvrtcGetErrorString(failed).decode()
            raise RuntimeError(f"{name} does not compile with {' '.join(options)}: {reason}\n{log}")
        if log:
            _logger.warning("compiling %s: %s", name, log)
        _check_nvrtc(library, library.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check_nvrtc(library, library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _check_nvrtc(library: ctypes.CDLL, code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed: {library.nvrtcGetErrorString(code).decode()}")


@functools.cache
def _driver() -> Any:
    """Load libcuda. Calls pass ctypes objects, because declared argument types would be converted at every launch."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"libcuda.so.1 cannot be loaded: {error}; install an NVIDIA driver") from error


def _check(code: int, call: str) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(c_int(code), byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"{call} failed: {reason} (CUresult {code})")


def _bind_context() -> None:
    """Set the context of torch's current device if this thread has none, or another device's.

    An autograd thread has none before its first CUDA call. It is checked once per thread and device: whatever changes
    torch's current device later changes the context too.
    """
    index, bound = torch.cuda.current_device(), vars(_of_this_thread).setdefault("devices", set())
    if index in bound:
        return
    driver, context, device, wanted = _driver(), c_void_p(), c_int(), c_int()
    _check(driver.cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
    if context:
        _check(driver.cuCtxGetDevice(byref(device)), "cuCtxGetDevice")
    _check(driver.cuDeviceGet(byref(wanted), c_int(index)), "cuDeviceGet")
    if not context or device.value != wanted.value:
        _check(driver.cuDevicePrimaryCtxRetain(byref(context), wanted), "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    bound.add(index)


class TensorMap:
    """A tensor map for the bulk copy engine: 128 opaque bytes at an address that is a multiple of 64."""

    __slots__ = ("_storage", "address")

    def __init__(self) -> None:
        self._storage = (c_char * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
        begin = ctypes.addressof(self._storage)
        self.address = begin + -begin % TENSOR_MAP_ALIGNMENT


def tensor_map(pointer: int, sizes: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Return the map of a bf16 tensor, innermost dimension first, copied box by box with 128-byte swizzle.

    `strides_bytes` leaves out the innermost dimension. Elements out of bounds are read as zeros and not written. Maps
    are cached and shared, which is safe since they hold only addresses and shapes.
    """
    return _encoded(pointer, tuple(sizes), tuple(strides_bytes), tuple(box))


@functools.lru_cache(maxsize=TENSOR_MAPS_KEPT)
def _encoded(pointer: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    rank = len(sizes)
    assert len(strides_bytes) == rank - 1 and len(box) == rank, (sizes, strides_bytes, box)
    _bind_context()
    encoded = TensorMap()
    code = _driver().cuTensorMapEncodeTiled(
        c_void_p(encoded.address), c_int(_BFLOAT16), c_uint32(rank), c_void_p(pointer), (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides_bytes), (c_uint32 * rank)(*box), (c_uint32 * rank)(*[1] * rank),
        c_int(_INTERLEAVE_NONE), c_int(_SWIZZLE_128B), c_int(_L2_PROMOTION_256B), c_int(_OUT_OF_BOUNDS_ZEROS),
    )
    if code:
        what = f"pointer={pointer:#x}, sizes={sizes}, strides_bytes={strides_bytes}, box={box}"
        _check(code, f"cuTensorMapEncodeTiled({what})")
    return encoded


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((f"{what}_{axis}", c_uint32) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", c_uint32), ("stream", c_void_p), ("attributes", c_void_p), ("num_attributes", c_uint32),
    )
    grid_x: int
    block_x: int


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel of a module loaded on the device that was current; its launches need that device to be current."""

    name: str
    types: str  # parameters in order: struct codes i, q, f and P, and T for a tensor map
    num_threads: int  # of a block
    shared_bytes: int  # dynamic, of a block
    handle: c_void_p

    def launch(self, grid: int, stream: int, *maps: TensorMap) -> Launch:
        return Launch(self, grid, stream, maps)


class Launch:
    """A reusable launch of one kernel on one stream with fixed tensor maps; each call only fills in the numbers.

    A launch belongs to the thread that created it: autograd's backward launches from another thread, and a ctypes call
    releases the GIL while the driver still reads the arguments.
    """

    __slots__ = ("_config", "_maps", "_name", "_pack", "_run")

    def __init__(self, function: Function, grid: int, stream: int, maps: Sequence[TensorMap] = ()) -> None:
        _bind_context()
        layout, offsets = _layout(function.types)
        storage = ctypes.create_string_buffer(max(1, layout.size))
        begin, addresses = ctypes.addressof(storage), iter([one.address for one in maps])
        pointers = (c_void_p * len(offsets))(
            *(next(addresses) if offset is None else begin + offset for offset in offsets))
        assert next(addresses, None) is None, f"{function.name} takes fewer tensor maps than {len(maps)}"
        self._maps, self._name = tuple(maps), function.name
        self._config = _LaunchConfig(grid, 1, 1, function.num_threads, 1, 1, function.shared_bytes, stream)
        self._pack = functools.partial(layout.pack_into, storage, 0)
        self._run = functools.partial(_driver().cuLaunchKernelEx, byref(self._config), function.handle, pointers, None)

    def __call__(self, *numbers: int | float) -> None:
        """Queue the launch; addresses are plain integers. The driver copies the numbers before this returns.

        Raises struct.error if the numbers do not match the kernel's types.
        """
        self._pack(*numbers)
        code = self._run()
        if code:
            grid, block = self._config.grid_x, self._config.block_x
            _check(code, f"cuLaunchKernelEx of {self._name} with grid {grid} and block {block}")


@functools.cache
def _layout(types: str) -> tuple[struct.Struct, list[int | None]]:
    """Return the struct of a kernel's numbers, and each parameter's offset in it; None for a tensor map."""
    codes, offsets = "", list[int | None]()
    for code in types:
        offsets.append(None if code == "T" else struct.calcsize(f"{codes}0{code}"))  # "0q" aligns
        codes += "" if code == "T" else code
    return struct.Struct(codes), offsets


def load_functions(cubin: bytes, signatures: Mapping[str, tuple[str, int, int]]) -> list[Function]:
    """Load `extern "C"` kernels, given types, threads and shared bytes by name; they stay until the process ends."""
    _bind_context()
    driver, module, functions = _driver(), c_void_p(), []
    _check(driver.cuModuleLoadData(byref(module), c_char_p(cubin)), "cuModuleLoadData")
    for name, (types, num_threads, shared_bytes) in signatures.items():
        handle = c_void_p()
        _check(driver.cuModuleGetFunction(byref(handle), module, name.encode()), f"cuModuleGetFunction of {name}")
        code = driver.cuFuncSetAttribute(handle, c_int(_MAX_DYNAMIC_SHARED_SIZE_BYTES), c_int(shared_bytes))
        _check(code, f"cuFuncSetAttribute of {name} to {shared_bytes} bytes of dynamic shared memory")
        functions.append(Function(name, types, num_threads, shared_bytes, handle))
    return functions
