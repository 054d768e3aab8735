"""A step's spans on a clock that is told."""

import pytest
import torch

from distca.runtime import recorder


def test_linear_layers_are_what_attention_and_waits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 4.0, 4.0, 5.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr(recorder, "perf_counter", lambda: next(clock))
    noted = recorder.Recorder(torch.device("cpu"))               # 0
    with noted.span("layers", "linear"):                         # 1 to 9
        with noted.span("attention forward", "attention"):       # 2 to 4
            pass
        with noted.span("exchange", "wait", 7):                  # 4 to 5
            pass
    with noted.span("optimizer", "optimizer"):                   # 10 to 12
        pass
    trace = noted.end_step(0, 1)
    assert [(span.name, span.start_seconds, span.stop_seconds, span.num_bytes) for span in trace.spans] == [
        ("layers", 1.0, 2.0, 0), ("attention forward", 2.0, 4.0, 0), ("exchange", 4.0, 5.0, 7), ("layers", 5.0, 9.0, 0),
        ("optimizer", 10.0, 12.0, 0)]
