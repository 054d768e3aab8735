"""What a batch holds: the lengths of its documents, and the rank on which each of their tokens lives."""
