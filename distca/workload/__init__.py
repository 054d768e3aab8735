"""Batches: the lengths of their documents, and the rank on which each token lives."""
