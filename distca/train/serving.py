"""What a rank does that only serves attention: no layers, no data, no checkpoints, nothing that outlives a call.

It runs whatever the first training rank of its pool announces, until that says that the run is over. Asked to stop, it
goes on serving: those that train agree on the last step, save, and let it go.
"""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import torch

from distca.runtime.attention import CoreAttention
from distca.runtime.dedicated import serve_until_stopped
from distca.runtime.transport import TransportError
from distca.train.collectives import set_timeouts
from distca.train.groups import groups_of, transport_between
from distca.train.settings import Settings


def serve(settings: Settings, device: torch.device) -> int:
    """Serve to the end of the run; how many calls that were. The trainers' failure is an error here too."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    groups = groups_of(settings, device)
    attention = CoreAttention(groups.servers, kernel=settings.attention.kernel,
                              transport=transport_between(groups.servers, settings),
                              spare_multiprocessors=settings.attention.spare_multiprocessors)
    set_timeouts(timedelta(seconds=settings.run.timeout_seconds))
    try:
        return serve_until_stopped(attention, device)
    except TransportError:
        if asked:  # the trainers were asked too, and some ended before they listened
            return 0
        raise
