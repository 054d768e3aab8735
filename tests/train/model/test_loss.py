"""Cross-entropy in chunks equals PyTorch's on full logits, which it never holds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.train.model.loss import chunked_cross_entropy
from tests.support.attention import gradient


def random_case(num_tokens: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64,
                hidden_size: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=dtype)
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    labels[torch.rand(num_tokens, generator=generator) < 0.3] = -100
    return hidden, weight, labels


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 50), st.integers(0, 1000))
def test_equals_cross_entropy_with_gradients(num_tokens: int, vocab: int, chunk: int, seed: int) -> None:
    hidden, weight, labels = random_case(num_tokens, vocab, seed)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    total, count = chunked_cross_entropy(hidden, weight, labels, chunk)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="sum")
    assert int(count) == int((labels != -100).sum())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(3.0 * x, leaves) for x in (total, expected))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    hidden, weight, labels = random_case(9, 7, 5)
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, labels, 4)[0],
                                    (hidden.requires_grad_(), weight.requires_grad_()))


def test_bfloat16_sums_in_float32() -> None:
    hidden, weight, labels = random_case(500, 64, 0, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    total, _ = chunked_cross_entropy(hidden, weight, labels, 100)
    expected = F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    got = torch.autograd.grad(total, [hidden, weight])
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    best = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum"), exact)
    same = torch.autograd.grad(expected, [hidden, weight])
    for ours, theirs, want in zip(got, same, best, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - want).abs().max() <= 2 * (theirs - want).abs().max()


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function: Any, types: tuple[()], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> int | torch.Tensor:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_never_holds_full_logits() -> None:
    num_tokens, vocab, chunk = 512, 400, 32
    hidden, weight, labels = random_case(num_tokens, vocab, 1, hidden_size=16)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as seen:
        chunked_cross_entropy(hidden, weight, labels, chunk)[0].backward()
    assert seen.largest == max(chunk * vocab, hidden.numel())
    with LargestTensor() as full:
        F.cross_entropy(hidden @ weight.T, labels).backward()
    assert full.largest == num_tokens * vocab


def test_no_labels_at_all() -> None:
    hidden, weight, _ = random_case(5, 4, 0)
    total, count = chunked_cross_entropy(hidden.requires_grad_(), weight, torch.full((5,), -100), 2)
    total.backward()
    assert (float(total.detach()), int(count), float(gradient(hidden).abs().sum())) == (0.0, 0, 0.0)


@pytest.mark.parametrize("labels, message", [
    ([0, 4, 1], "labels hold 4 but the vocabulary has 4"), ([0, -1, 1], "labels hold -1")])
def test_labels_outside_the_vocabulary_are_refused(labels: list[int], message: str) -> None:
    hidden, weight, _ = random_case(3, 4, 0)
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(hidden, weight, torch.tensor(labels), 2)
