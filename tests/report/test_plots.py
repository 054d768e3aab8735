"""The picture holds every server's work and bytes, at any size."""

import numpy as np
import pytest

from distca.report.plots import MAX_BARS, draw, save_plot


@pytest.fixture
def skewed(make_batch):
    def batch(ranks, dedicated=0):
        before = np.random.default_rng(ranks).exponential(size=ranks)
        after = np.full(ranks + dedicated, before.sum() / (ranks + dedicated))
        return make_batch(before, after, sent=1e8 * after, tolerance=0.1)

    return batch


@pytest.mark.parametrize(("ranks", "dedicated"), [(1, 0), (8, 0), (8, 2), (MAX_BARS, 0)])
def test_few_servers_get_a_bar_each(skewed, ranks, dedicated):
    figures = skewed(ranks, dedicated)
    top, bottom = draw(figures).axes
    mean = figures.before.work.mean()
    heights = [bar.get_height() for bar in top.patches]
    np.testing.assert_allclose(heights, np.concatenate([figures.before.work, figures.after.work]) / mean)
    assert len(bottom.patches) == len(heights)


def test_many_servers_get_outlines_with_a_step_each(skewed):
    figures = skewed(512)
    top, _ = draw(figures).axes
    before = top.patches[0].get_data().values
    np.testing.assert_allclose(before, figures.before.work / figures.before.work.mean())
    assert len(top.patches) < 10


def test_mean_and_tolerance_are_drawn_where_they_are(skewed):
    figures = skewed(8, dedicated=2)
    top, _ = draw(figures).axes
    mean = figures.after.work.mean() / figures.before.work.mean()
    levels = sorted(line.get_ydata()[0] for line in top.lines)
    np.testing.assert_allclose(levels, [mean, 1.1 * mean])
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels[:2] == ["before", "after"] and "10%" in labels[3]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_format_follows_the_suffix(skewed, tmp_path, suffix, magic):
    save_plot(skewed(64), tmp_path / f"plan.{suffix}")
    assert (tmp_path / f"plan.{suffix}").read_bytes().startswith(magic)
