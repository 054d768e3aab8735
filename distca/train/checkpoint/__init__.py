"""Checkpoints: written beside training, verified byte by byte, resumed, and exported."""
