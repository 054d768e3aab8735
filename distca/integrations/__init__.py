"""Balanced attention inside other trainers (an `enable` for each), and the check of their versions."""

from __future__ import annotations

import re
from typing import Any

STATEFUL = {"linear_attention", "mamba", "conv", "recurrent"}  # layer types with a state along the document
_SUPPORTED = {  # first supported version, first unsupported one
    "transformers": ((5, 4), (6, 0)),
    "torchtitan": ((0, 3), (0, 4)),
    "megatron-core": ((0, 16), (0, 20)),
}


def check_version(package: str, version: str) -> None:
    """Raise a one-line ImportError if the version is not supported."""
    first, below = _SUPPORTED[package]
    if not first <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < below:
        raise ImportError(f"{package} is {version} but distca supports {_supported(package)}")


def not_installed(package: str, error: ImportError) -> ImportError:
    """Return the one-line error of an integration whose package cannot be imported."""
    return ImportError(f"this integration needs {package} {_supported(package)} ({error})")


def _supported(package: str) -> str:
    """Return the supported versions, and how to install one."""
    first, below = (".".join(map(str, edge)) for edge in _SUPPORTED[package])
    return f"from {first} to below {below}; pip install '{package}>={first},<{below}'"


def layer_types(config: Any) -> set[str]:
    """Return the kinds of layers that a Transformers config names; none where it names none."""
    return set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def stateful_layers(config: Any) -> list[str]:
    """Return the kinds of its layers that carry a state along each document."""
    return sorted(layer_types(config) & STATEFUL)
