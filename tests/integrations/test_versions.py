"""A trainer that is missing, or of another version, is one line that says what to install."""

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


@pytest.mark.parametrize(("package", "version"), [
    ("transformers", "5.4.0"), ("transformers", "5.13.0.dev0"), ("torchtitan", "0.3.0"), ("megatron-core", "0.16.1rc2"),
])
def test_these_versions_are_supported(package: str, version: str) -> None:
    check_version(package, version)
