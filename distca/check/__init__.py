"""Probes that say whether packing is right in a model and its trainer, and what is wrong where.

A probe calls the model with batches that differ in something that must not matter, or must, and compares the outputs:
one token is changed, a document is packed or alone, on one rank or on several. No probe looks at code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distca.models import CONFIG
from distca.validation import UserError

FOLLOW = ("alone", "over-ranks", "gradients")  # kinds that come of others, where there are any
LAYER = "layer-"                               # before a kind: the same, seen in single layers


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, where, how large and what to do about it."""

    kind: str                    # a stable name of what is wrong, such as "other-documents"
    what: str
    where: str
    size: float | None           # relative to the largest output, gradient or loss; None where it is not a number
    bound: float | None          # what rounding explains of it
    remedy: str

    @property
    def line(self) -> str:
        measured = "" if self.size is None else f", by {self.size:.1e} (rounding explains {self.bound or 0.0:.1e})"
        return f"{self.what}: {self.where}{measured}; {self.remedy}"

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "line": self.line}


def config_file(name: str) -> Path | None:
    """Return the config.json that MODEL names, or None if it names a function; refuse what is neither."""
    path = Path(name)
    if ":" in name and not path.exists():
        return None
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"MODEL is {name!r}; give a folder with a {CONFIG}, a {CONFIG}, or module:function, which "
                        "returns a model and a batch")
    return file


def causes(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings of which the others are consequences."""
    kinds = {one["kind"] for one in findings}
    return [one for one in findings if one["kind"] not in FOLLOW and one["kind"].removeprefix(LAYER) not in
            kinds - {one["kind"]}] or findings
