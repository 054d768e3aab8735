"""Keep the layers in order, and planning free of torch."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import distca

PACKAGE = Path(distca.__file__).parent
ROOT = PACKAGE.parent

_SHAPES = {"validation", "columns", "spec", "models"}
_PLANNING = _SHAPES | {"workload", "cost", "planning"}
_RUNTIME = _PLANNING | {"trace", "dispatch", "kernels", "runtime"}
MAY_IMPORT = {  # the left of every arrow in DESIGN.md
    "validation": set(),
    "columns": {"validation"},
    "spec": {"validation"},
    "models": {"validation", "spec"},
    "trace": {"validation"},
    "workload": {"validation", "columns", "spec"},
    "corpus": {"validation", "columns", "spec", "workload"},
    "data": {"validation", "columns", "workload"},
    "cost": _SHAPES | {"workload"},
    "planning": _SHAPES | {"workload", "cost"},
    "baselines": _PLANNING,
    "simulate": _PLANNING | {"baselines", "trace"},
    "report": _PLANNING | {"simulate", "trace"},
    "dispatch": _PLANNING,
    "kernels": {"validation", "columns", "cost"},
    "runtime": _RUNTIME - {"runtime"},
    "profiling": _RUNTIME,
    "train": _RUNTIME | {"corpus", "baselines", "simulate"},      # a step is timed before it is run
    "integrations": _RUNTIME,
    "check": _RUNTIME | {"data", "integrations"},
}
MAY_IMPORT_ALL = {"__init__", "__main__", "api", "cli"}
WITHOUT_TORCH = _PLANNING | {"trace", "corpus", "baselines", "simulate", "dispatch", "report", "api", "cli"}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imported_layers(source: str) -> set[str]:
    """Layers of distca that a module names in any import, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] if len(part) > 1 else "__init__" for part in parts if part[0] == "distca"}


@pytest.mark.parametrize("path", _modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_layers_import_only_what_is_left_of_them(path: Path) -> None:
    layer = _layer(path)
    if layer in MAY_IMPORT_ALL:
        return
    assert layer in MAY_IMPORT, f"{layer} is not in MAY_IMPORT"
    assert _imported_layers(path.read_text(encoding="utf-8")) <= MAY_IMPORT[layer] | {layer}


def test_the_check_sees_imports_of_every_form() -> None:
    source = "import distca.planning.plan\ndef f():\n    from distca import cli\n    from distca.cost.work import x\n"
    assert _imported_layers(source) == {"planning", "cli", "cost"}
    assert _imported_layers("import distca\nimport numpy") == {"__init__"}


def test_layers_have_no_cycle() -> None:
    for layer, allowed in MAY_IMPORT.items():
        for other in allowed:
            assert layer not in MAY_IMPORT[other]


def _imports_at_the_top(path: Path, modules: Collection[str]) -> Iterator[str]:
    """Modules that a file imports when it is loaded, or for types; functions may import later."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else str(node.module) for name in named)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)


def test_modules_have_no_cycle() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
               for path in _modules()}
    graph = {name: set(_imports_at_the_top(path, modules)) & modules.keys() - {name} for name, path in modules.items()}
    assert len(graph["distca.planning.balance"]) > 3
    TopologicalSorter(graph).prepare()                           # raises CycleError, which names the modules


def test_planning_and_report_import_without_torch() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in _modules()
             if _layer(path) in WITHOUT_TORCH]
    assert any("planning" in name for name in names)
    code = (f"import sys\nsys.modules['torch'] = None\nfor name in {names!r}: __import__(name)\n"
            "import distca\ndistca.pack, distca.plan\n"
            "assert not [name for name in sys.modules if name.startswith('torch.')]\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert distca.__version__ == project["project"]["version"]


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pakc'"):
        _ = distca.pakc  # type: ignore[attr-defined]
