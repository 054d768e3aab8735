"""Draw the pictures of docs/ that our own code makes: from plans, simulations and the measured results.

    python docs/make_figures.py              # all; after the planner, the simulator or a result changed
    python docs/make_figures.py step growth  # some
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))                                    # docs.figures; as a script its own folder comes first

from docs.figures import charts, diagrams, step, stragglers  # noqa: E402

FIGURES: dict[str, Callable[[], str]] = {"step": step.step, **stragglers.FIGURES, **charts.FIGURES, **diagrams.FIGURES}


def path(name: str) -> Path:
    return ROOT / "docs/images" / f"{name}.svg"


if __name__ == "__main__":
    for name in sys.argv[1:] or FIGURES:
        path(name).write_text(FIGURES[name](), encoding="utf-8")
