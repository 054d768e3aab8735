"""Merging partial attention: exact where a side saw nothing, and safe where scores are far apart."""

import torch

from distca.kernels import merge


def test_merge_with_nothing_is_exact() -> None:
    """Bit for bit: exp(-inf) is 0 and exp(0) is 1, so that x is added to 0 and multiplied by 1."""
    out, lse = torch.randn(5, 2, 8), torch.randn(5, 2)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])
    assert torch.equal(merge(*nothing, *nothing)[1], nothing[1])


def test_merge_keeps_very_different_scores_finite() -> None:
    out, lse = torch.ones(1, 1, 4), torch.tensor([[1e4]])
    merged, total = merge(out, lse, -out, -lse)
    assert torch.equal(merged, out)                              # exp(-2e4) is 0
    assert torch.equal(total, lse)
