"""Ranks of unlike speeds in another trainer: plans follow the speeds that were set last."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from distca.integrations.document_lengths import RowSlices, whole_documents
from distca.integrations.packed import PackedAttention
from distca.models import MODELS


def test_plans_follow_the_speeds_that_were_set_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: tuple[RowSlices, ...] = (whole_documents([8192]), whole_documents([8192]))
    attention = PackedAttention(model=MODELS["llama3-8b"], tolerance=0.02)
    monkeypatch.setattr(attention, "_exchange", lambda *_: rows)

    def share() -> float:
        plan = attention.begin(rows[0]).plan
        assert plan is not None
        plan.validate()
        work = plan.work()
        return float(work[1] / work.sum())

    assert share() == 0.5
    attention.speed = [1.0, 0.5]
    assert share() == pytest.approx(1 / 3, rel=0.021)
    attention.speed = None
    assert share() == 0.5
    attention.speed = [1.0]
    with pytest.raises(ValueError, match=r"speed has .* 2 ranks"):
        share()
