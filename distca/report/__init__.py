"""Pages, pictures and tables of plans, traces and comparisons."""
