"""Refused calls and their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line that a call is refused with."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError(f"{call} was not refused")
