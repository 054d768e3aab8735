"""A trainer that is missing, or of another version, is one line that says what to install."""

import importlib.util
import subprocess
import sys

import pytest

from distca.integrations import check_version


def messages(*attempts: tuple[str, str]) -> list[str]:
    """ImportErrors of integrations in a new process, each imported after a statement of its own."""
    code = "".join(f"try:\n    {statement}\n    import distca.integrations.{module}\nexcept ImportError as error:\n"
                   "    print(error)\n" for statement, module in attempts)
    return subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True,
                          check=True).stdout.splitlines()


def test_absence_is_one_line() -> None:
    found = messages(*((f"sys.modules[{name!r}] = None", module) for name, module in (
        ("transformers", "huggingface"), ("torchtitan", "torchtitan"), ("megatron", "megatron_core"))))
    for package, first, below, line in zip(("transformers", "torchtitan", "megatron-core"), ("5.4", "0.3", "0.16"),
                                           ("6.0", "0.4", "0.20"), found, strict=True):
        assert f"needs {package} from {first} to below {below}; pip install '{package}>={first},<{below}' (" in line


@pytest.mark.parametrize(("package", "version", "wanted"), [
    ("transformers", "4.57.1", "5.4 to below 6.0"), ("transformers", "5.3.0", "5.4 to below 6.0"),
    ("transformers", "6.0.0", "5.4 to below 6.0"), ("torchtitan", "0.2.9", "0.3 to below 0.4"),
    ("torchtitan", "0.4.0", "0.3 to below 0.4"), ("megatron-core", "0.15.9", "0.16 to below 0.20"),
    ("megatron-core", "0.20.0", "0.16 to below 0.20"),
])
def test_other_versions_are_one_line(package: str, version: str, wanted: str) -> None:
    with pytest.raises(ImportError) as refused:
        check_version(package, version)
    first, below = wanted.split(" to below ")
    assert str(refused.value) == f"{package} is {version} but distca supports from {wanted}; pip install " \
                                 f"'{package}>={first},<{below}'"


def test_importing_beside_another_version_is_one_line() -> None:
    claims = {"transformers": ("import transformers; transformers.__version__ = '6.0.0'", "huggingface"),
              "megatron": ("import megatron.core; megatron.core.__version__ = '0.20.0'", "megatron_core"),
              "torchtitan": ("from importlib import metadata; metadata.version = lambda name: '0.4.0'", "torchtitan")}
    installed = [package for package in claims if importlib.util.find_spec(package) is not None]
    found = messages(*(claims[package] for package in installed))
    assert len(found) == len(installed) and all(" but distca supports from " in line for line in found)


@pytest.mark.parametrize(("package", "version"), [
    ("transformers", "5.4.0"), ("transformers", "5.13.0.dev0"), ("torchtitan", "0.3.0"), ("megatron-core", "0.16.1rc2"),
    ("megatron-core", "0.19.2"),
])
def test_these_versions_are_supported(package: str, version: str) -> None:
    check_version(package, version)
