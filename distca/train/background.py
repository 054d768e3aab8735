"""Work beside training, on threads that no process waits for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[..., Result], *args: Any) -> Future[Result]:
    """Run the call on such a thread; the future holds its result or what it raised."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"distca-{call.__name__}", daemon=True).start()
    return future
