"""Show plans, traces and comparisons as HTML pages, plots and terminal tables."""
