"""What the tests of other people's trainers share: documents, losses, comparisons, refusals and their examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def rows_of_tokens(rows, vocab, changed=None):
    """Tokens and next tokens of every rank's documents; `changed` names a (rank, document) that gets another token."""
    generator = torch.Generator().manual_seed(5)
    documents = [[torch.randint(vocab, (length + 1,), generator=generator) for length in row] for row in rows]
    if changed is not None:
        document = documents[changed[0]][changed[1]]
        document[0] = (document[0] + 1) % vocab
    return documents


def total_loss(logits, documents):
    labels = torch.cat([document[1:] for document in documents])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def assert_same(actual, expected):
    """By name, to 1e-5 of the largest entry: gradients are sums over all tokens."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        atol = 1e-5 * float(x.abs().max())
        torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=atol, msg=lambda m, at=name: f"{at}: {m}")


def balance_of(plan):
    """Work per server, and whether any task moved."""
    return plan.work().tolist(), bool((plan.tasks.home != plan.tasks.server).any())


def assert_balanced(result):
    work, moved = result
    assert moved
    assert max(work) < 1.3 * sum(work) / len(work), work


def refusals(wrong):
    """What each call says that is refused."""
    told = []
    for call in wrong:
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def assert_told(told, expected):
    assert all(part in line for part, line in zip(expected, told, strict=True)), told


def values(outcomes):
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def run_example(framework, script, folder, ranks, *arguments):
    """Its printed work max/mean on CPU ranks, at home and with distca."""
    root = HERE.parents[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
              str(HERE / "on_cpu.py"), framework, str(root / "examples" / script)]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=280, cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    home, balanced = re.search(r"max/mean (\S+) at home, (\S+) with distca", done.stdout).groups()
    return float(home), float(balanced)
