"""The model under check on all ranks at once: a call takes every rank's batch, and a number per token comes back.

Every rank runs the same probes in the same order on its own batch. What a probe judges is gathered, so every rank finds
the same. On one process it is the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distca.check.batches import Batch, Tokens, without_labels
from distca.check.subject import Subject, plain_copy, whole
from distca.validation import UserError
from distca.workload.documents import IGNORED

Gradients = dict[str, torch.Tensor]


class Sums(NamedTuple):
    """Cross entropy summed over some tokens, and how many of them have labels."""

    loss: float
    labels: int


class World:
    """The subject on this rank, and what the ranks tell each other."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @cached_property
    def plain(self) -> Any:
        """The plain copy with eager attention, or None."""
        return plain_copy(self.subject)

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in rank order."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def join(self, mine: torch.Tensor) -> np.ndarray:
        """Return every rank's numbers, one after the other."""
        return np.concatenate(self.gather(mine.detach().cpu().numpy()))

    def run(self, batch: Batch, model: torch.nn.Module | None = None) -> Any:
        """Call the model as the trainer does, recording gradients; only then does distca's attention leave home."""
        moved = {name: value.to(self.subject.device) if isinstance(value, torch.Tensor) else value
                 for name, value in batch.items()}
        with torch.enable_grad():
            return (model or self.subject.model)(**moved)

    def logits(self, batches: Sequence[Batch], model: torch.nn.Module | None = None) -> torch.Tensor:
        """Return this rank's logits [tokens, vocabulary] in float64."""
        batch = batches[self.rank]
        found = logits_in(self.run(without_labels(batch), model)).detach()
        tokens = batch["input_ids"].numel()
        if found.shape[:-1].numel() != tokens:
            raise UserError(f"the model returned logits of shape {tuple(found.shape)} for {tokens} tokens; return "
                            "logits of every token")
        return found.reshape(tokens, -1).double()

    def gradients(self, run: Callable[[], object], *, summed: bool = False) -> Gradients:
        """Return the gradients that `run` leaves, summed over ranks if they are not yet `summed` by a trainer's step.

        DDP and FSDP average over ranks; what they leave is multiplied by the ranks, as a trainer multiplies the loss.
        """
        model, found = self.subject.model, {}
        model.zero_grad(set_to_none=True)
        run()
        for name, parameter in (self.subject.inner or model).named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                averaged = isinstance(model, DistributedDataParallel) or hasattr(gradient, "full_tensor")
                found[name] = whole(gradient).detach().double()
                if self.size > 1 and averaged and not summed:
                    found[name] *= self.size
                elif self.size > 1 and not summed:
                    dist.all_reduce(found[name])
        model.zero_grad(set_to_none=True)
        return found


def logits_in(result: Any) -> torch.Tensor:
    """Return the logits in what a model returned: by name, or the tensor with most dimensions."""
    named = result.get("logits") if isinstance(result, dict) else getattr(result, "logits", None)
    if named is None:
        found = [one for one in (result if isinstance(result, tuple | list) else [result])
                 if isinstance(one, torch.Tensor) and one.ndim >= 2]
        if not found:
            raise UserError(f"the model returned a {type(result).__name__} without logits; return an object or a dict "
                            "with logits [rows, tokens, vocabulary]")
        named = found[0]
    return named


def loss_in(result: Any) -> torch.Tensor | None:
    """Return the loss in what a model returned, if it has one."""
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if named is None and isinstance(result, tuple | list):
        named = next((one for one in result if isinstance(one, torch.Tensor) and one.ndim == 0), None)
    return named if isinstance(named, torch.Tensor) else None


def is_shifted(world: World, batches: Sequence[Batch]) -> bool:
    """Return whether `labels` are the next tokens already, and the model compares its outputs with them as they are."""
    batch, subject = batches[world.rank], world.subject
    labels = batch.get("labels")
    if labels is None or batch.get("shift_labels") is not None:
        return False
    given = labels[:, :-1] != IGNORED
    is_next = (labels[:, :-1] == batch["input_ids"][:, 1:])[given]
    loss = loss_in(world.run(batch)) if all(world.gather(2 * int(is_next.sum()) > len(is_next))) else None
    if loss is None or subject.inner is None:
        return loss is not None
    total = sums(world.logits(batches), labels.flatten().numpy())
    return all(world.gather(abs(float(loss.detach()) - total.loss / max(total.labels, 1)) < 1e-4 * abs(total.loss)))


def sums(logits: torch.Tensor, labels: np.ndarray) -> Sums:
    """Return the summed cross entropy of logits [tokens, vocabulary] with labels [tokens]."""
    given = torch.from_numpy(labels).to(logits.device)
    total = cross_entropy(logits, given, ignore_index=IGNORED, reduction="sum")
    return Sums(float(total), int((given != IGNORED).sum()))


def scale_of(world: World, tokens: Tokens, outputs: torch.Tensor) -> float:
    """Return the largest output of all ranks' tokens that are not padding."""
    sizes = world.join(outputs.abs().amax(dim=-1).nan_to_num(nan=0.0, posinf=0.0))
    return largest(tokens, sizes) or 1.0


def far(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [tokens] how far each token's outputs are from what is expected; nan counts as far."""
    return (actual - expected).abs().nan_to_num(nan=torch.inf).amax(dim=-1)


def largest(tokens: Tokens, per_token: np.ndarray) -> float:
    """Return the largest of the tokens that are not padding."""
    return float(per_token[tokens.document >= 0].max(initial=0.0))
