"""The picture holds every server's work and bytes, at any size."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle, StepPatch

from distca.report.figures import PlannedBatch
from distca.report.plots import MAX_BARS, draw, save_plot


@pytest.fixture
def skewed(make_batch: Callable[..., PlannedBatch]) -> Callable[..., PlannedBatch]:
    def batch(ranks: int, dedicated: int = 0) -> PlannedBatch:
        before = np.random.default_rng(ranks).exponential(size=ranks)
        after = np.full(ranks + dedicated, before.sum() / (ranks + dedicated))
        return make_batch(before, after, sent=1e8 * after, tolerance=0.1)

    return batch


@pytest.mark.parametrize(("ranks", "dedicated"), [(1, 0), (8, 0), (8, 2), (MAX_BARS, 0)])
def test_few_servers_get_a_bar_each(skewed: Callable[..., PlannedBatch], ranks: int, dedicated: int) -> None:
    figures = skewed(ranks, dedicated)
    top, bottom = draw(figures).axes
    mean = figures.before.work.mean()
    heights = [bar.get_height() for bar in top.patches if isinstance(bar, Rectangle)]
    np.testing.assert_allclose(heights, np.concatenate([figures.before.work, figures.after.work]) / mean)
    assert len(bottom.patches) == len(heights)


def test_many_servers_get_outlines_with_a_step_each(skewed: Callable[..., PlannedBatch]) -> None:
    figures = skewed(512)
    top, _ = draw(figures).axes
    outline = top.patches[0]
    assert isinstance(outline, StepPatch)
    before, *_ = outline.get_data()
    np.testing.assert_allclose(before, figures.before.work / figures.before.work.mean())
    assert len(top.patches) < 10


def test_mean_and_tolerance_are_drawn_where_they_are(skewed: Callable[..., PlannedBatch]) -> None:
    figures = skewed(8, dedicated=2)
    top, _ = draw(figures).axes
    mean = figures.after.work.mean() / figures.before.work.mean()
    levels = sorted(float(np.asarray(line.get_ydata())[0]) for line in top.lines)
    np.testing.assert_allclose(levels, [mean, 1.1 * mean])
    legend = top.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["before", "after"] and "10%" in labels[3]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_format_follows_the_suffix(skewed: Callable[..., PlannedBatch], tmp_path: Path, suffix: str,
                                   magic: bytes) -> None:
    save_plot(skewed(64), tmp_path / f"plan.{suffix}")
    assert (tmp_path / f"plan.{suffix}").read_bytes().startswith(magic)
