"""Build the calculator as a folder of static files: the page, and beside it the planner with a Python for browsers.

The runtime comes from npm, by name, version and checksum: Pyodide, and emscripten-forge's numpy for the same Python
and the same compiler. Downloads are kept in a folder that git ignores. Where they cannot be had, the page is built
without them and says that it then only has closed forms.

    python docs/calculator/build.py build/calculator && python -m http.server --directory build/calculator
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
import urllib.request
import zipfile
from base64 import b64encode
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "calculator-downloads"
PAGE = ("index.html", "calculator.css", "calculator.js", "closed_forms.js", "charts.js", "worker.js")
REGISTRY = "https://registry.npmjs.org"
PYODIDE = (  # name, version, SHA-512 of the archive as npm lists it
    "pyodide", "0.27.7",
    "RUSVJlhQdfWfgO9hVHCiXoG+nVZQRS5D9FzgpLJ/VcgGBLSAKoPL8kTiOikxbHQm1kRISeWUBdulEgO26qpSRA==")
NUMPY = (
    "@emscripten-forge/numpy", "2.0.1-py312h4e66579-0",
    "64iP3tolNhBnKJBHs2b5Mg9s17BL8Bp9Ev2+U0fSCO3/zQlWQRCrExw2MgmfwjhNz+mwbKPG2eBsBcpBWV2xbA==")
RUNTIME = ("pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
SITE_PACKAGES = "lib/python3.12/site-packages/"
UNUSED = ("/tests/", "/f2py/", "/distutils/", "_umath_tests.", "_rational_tests.",
          "_operand_flag_tests.", "_struct_ufunc_tests.", "_simd.", "/testing/", ".pyi", "numpy/fft/_pocket")
ABSENT = ("runtime", "train", "integrations", "profiling", "kernels", "data.py", "dispatch.py")  # never imported here
MOMENT = (1980, 1, 1, 0, 0, 0)  # of every file in an archive, so that equal files make equal archives
FORM = {"kind": "typed", "lengths": "128k, 64k, 32k*2, 16k*2, 8k*4, 4k*48", "sampler": "prolong", "model": "llama3-8b",
        "cluster": "dgx-h200", "gpus": "64", "tp": "8", "pp": "1", "ep": "1", "context": "", "tokens_per_rank": "",
        "tolerance": "0.05", "recompute": "auto"}  # what the page opens with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write; what this wrote there before is replaced")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where downloads are kept; {CACHE} unless given")
    parser.add_argument("--offline", action="store_true", help="use downloads that are kept, and fetch nothing")
    options = parser.parse_args()
    print(build(options.out, options.cache, offline=options.offline))


def build(out: Path, cache: Path = CACHE, *, offline: bool = False) -> str:
    """Write the page into a folder, with its planner if the runtime can be had, and return what to tell the user."""
    sys.path[:0] = [str(HERE), str(ROOT)]
    out.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        if (HERE / name).resolve() != (out / name).resolve():
            shutil.copy(HERE / name, out / name)
    try:
        archives = [download(*one, cache, offline=offline) for one in (PYODIDE, NUMPY)]
    except OSError as error:
        missing = f"the calculator has closed forms only: {error}"
        (out / "built.json").write_text(json.dumps(description(None)))
        return f"{out}: {missing}"
    runtime = out / "runtime"
    runtime.mkdir(exist_ok=True)
    write_pyodide(archives[0], runtime)
    write_numpy(archives[1], runtime / "numpy.zip")
    write_planner(runtime / "distca.zip")
    (out / "built.json").write_text(json.dumps(description(f"Pyodide {PYODIDE[1]}, numpy {NUMPY[1].split('-')[0]}")))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return f"{out}: the page and its planner, {size / 1e6:.0f} MB"


def download(name: str, version: str, checksum: str, cache: Path, *, offline: bool) -> bytes:
    """Return a package's archive from the folder of downloads, or fetch it into there; its checksum has to be right."""
    kept = cache / f"{name.split('/')[-1]}-{version}.tgz"
    if not kept.exists():
        if offline:
            raise FileNotFoundError(f"{kept} is missing, and nothing is to be fetched")
        cache.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(f"{REGISTRY}/{name}/-/{kept.name}", timeout=60) as response:
            kept.write_bytes(response.read())
    content = kept.read_bytes()
    if b64encode(hashlib.sha512(content).digest()).decode() != checksum:
        kept.unlink()
        raise OSError(f"{kept} had another checksum than {name} {version}, and was deleted; build again")
    return content


def write_pyodide(archive: bytes, runtime: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for name in RUNTIME:
            member = files.extractfile(f"package/{name}")
            assert member is not None, f"{name} is a file"
            (runtime / name).write_bytes(member.read())
    lock = json.loads((runtime / "pyodide-lock.json").read_text())
    (runtime / "pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}))  # nothing else is ever fetched


def write_numpy(archive: bytes, path: Path) -> None:
    """Repack numpy without its tests and without what nothing here imports."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as outer:
        inner = next(member for member in outer if member.name.endswith(".tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(inner)) as files, zipfile.ZipFile(path, "w") as packed:
            for member in files:
                name = member.name.removeprefix(SITE_PACKAGES)
                if member.isfile() and name.startswith("numpy") and not any(part in name for part in UNUSED):
                    content = files.extractfile(member)
                    assert content is not None, f"{name} is a file"
                    _add(packed, name, content.read())


def write_planner(path: Path) -> None:
    """Pack this checkout's planner, simulator and readers of lengths, and the two modules beside this one."""
    sources = [one for one in sorted((ROOT / "distca").rglob("*")) if one.suffix in (".py", ".json")
               and one.relative_to(ROOT / "distca").parts[0] not in ABSENT]
    with zipfile.ZipFile(path, "w") as packed:
        for source in sources:
            if source != ROOT / "distca" / "cli" / "__init__.py":  # it imports every command, and with them torch
                _add(packed, str(source.relative_to(ROOT)), source.read_bytes())
        for name in ("answer.py", "browser.py"):
            _add(packed, name, (HERE / name).read_bytes())


def _add(packed: zipfile.ZipFile, name: str, content: bytes) -> None:
    packed.writestr(zipfile.ZipInfo(name, MOMENT), content, zipfile.ZIP_DEFLATED)


def description(planner: str | None) -> dict[str, Any]:
    """What the page knows without a planner: names, closed forms' coefficients, the answer to its first question."""
    from answer import answer, choices, coefficients

    import distca

    words = [word.split("*") for word in FORM["lengths"].split(", ")]
    source = ",".join(",".join([word[0]] * int(word[1] if len(word) > 1 else 1)) for word in words)
    first = {"source": source, **{name: FORM[name] for name in FORM if name not in ("kind", "lengths", "sampler")},
             "batches": "1"}
    answers = {part: json.loads(answer(json.dumps(first), part)) for part in ("plan", "fit")}
    return {"version": distca.__version__, "planner": planner, **choices({}), "coefficients": coefficients(),
            "first": {"form": FORM, "question": first, **answers}}


if __name__ == "__main__":
    main()
