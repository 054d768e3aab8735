"""A trainer that is missing, or of another version, is one line that says what to install."""

import importlib.util
import subprocess
import sys

import pytest

from distca.integrations import check_version


@pytest.mark.parametrize(("package", "module", "imported", "wanted"), [
    ("transformers", "huggingface", "transformers", "5.4 to below 6.0"),
    ("torchtitan", "torchtitan", "torchtitan", "0.3 to below 0.4"),
    ("megatron-core", "megatron_core", "megatron", "0.16 to below 0.17"),
])
def test_absence_is_one_line(package: str, module: str, imported: str, wanted: str) -> None:
    code = f"import sys, distca.integrations.packed; sys.modules[{imported!r}] = None; " \
           f"import distca.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    first, below = wanted.split(" to below ")
    assert done.returncode and f"needs {package} from {wanted}; pip install '{package}>={first},<{below}' (" in last


@pytest.mark.parametrize(("package", "version", "wanted"), [
    ("transformers", "4.57.1", "5.4 to below 6.0"), ("transformers", "5.3.0", "5.4 to below 6.0"),
    ("transformers", "6.0.0", "5.4 to below 6.0"), ("torchtitan", "0.2.9", "0.3 to below 0.4"),
    ("torchtitan", "0.4.0", "0.3 to below 0.4"), ("megatron-core", "0.15.9", "0.16 to below 0.17"),
    ("megatron-core", "0.17.0", "0.16 to below 0.17"),
])
def test_other_versions_are_one_line(package: str, version: str, wanted: str) -> None:
    with pytest.raises(ImportError) as refused:
        check_version(package, version)
    first, below = wanted.split(" to below ")
    assert str(refused.value) == f"{package} is {version} but distca supports from {wanted}; pip install " \
                                 f"'{package}>={first},<{below}'"


@pytest.mark.parametrize(("package", "module", "claim"), [
    ("transformers", "huggingface", "import transformers; transformers.__version__ = '6.0.0'"),
    ("torchtitan", "torchtitan", "from importlib import metadata; metadata.version = lambda name: '0.4.0'"),
    ("megatron", "megatron_core", "import megatron.core; megatron.core.__version__ = '0.17.0'"),
])
def test_importing_beside_another_version_is_one_line(package: str, module: str, claim: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run([sys.executable, "-c", f"{claim}; import distca.integrations.{module}"], capture_output=True,
                          text=True)
    assert done.returncode and " but distca supports from " in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("package", "version"), [
    ("transformers", "5.4.0"), ("transformers", "5.13.0.dev0"), ("torchtitan", "0.3.0"), ("megatron-core", "0.16.1rc2"),
])
def test_these_versions_are_supported(package: str, version: str) -> None:
    check_version(package, version)
