"""What the tests of other people's trainers share: documents, losses, comparisons, refusals and their examples."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distca.planning.plan import Plan

HERE = Path(__file__).parent


def rows_of_tokens(rows: list[list[int]], vocab: int,
                   changed: tuple[int, int] | None = None) -> list[list[torch.Tensor]]:
    """Tokens and next tokens of every rank's documents; `changed` names a (rank, document) that gets another token."""
    generator = torch.Generator().manual_seed(5)
    documents = [[torch.randint(vocab, (length + 1,), generator=generator) for length in row] for row in rows]
    if changed is not None:
        document = documents[changed[0]][changed[1]]
        document[0] = (document[0] + 1) % vocab
    return documents


def total_loss(logits: torch.Tensor, documents: list[torch.Tensor]) -> torch.Tensor:
    labels = torch.cat([document[1:] for document in documents])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-5) -> None:
    """By name, to `bound` of the largest entry: gradients are sums over all tokens."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        atol = bound * float(x.abs().max())
        torch.testing.assert_close(actual[name], x, rtol=bound, atol=atol, msg=partial("{}: {}".format, name))


def balance_of(plan: Plan) -> tuple[list[float], bool]:
    """Work per server, and whether any task moved."""
    return plan.work().tolist(), bool((plan.tasks.home != plan.tasks.server).any())


def assert_balanced(result: tuple[list[float], bool]) -> None:
    work, moved = result
    assert moved
    assert max(work) < 1.3 * sum(work) / len(work), work


def refusals(wrong: list[Callable[..., Any]]) -> list[str]:
    """The messages of the calls that are refused."""
    messages = []
    for call in wrong:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def assert_refused(messages: list[str], expected: list[str]) -> None:
    assert all(part in line for part, line in zip(expected, messages, strict=True)), messages


def run_example(framework: str, script: str, folder: Path, ranks: int, *arguments: str) -> tuple[float, float]:
    """Its printed work max/mean on CPU ranks, at home and with distca."""
    root = HERE.parents[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
              str(HERE / "on_cpu.py"), framework, str(root / "examples" / script)]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=280, cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    home, balanced = re.findall(r"max/mean (\S+) at home, (\S+) with distca", done.stdout)[0]
    return float(home), float(balanced)
