"""The decoder: shape, layers, loss; pipeline stages, sharding, compilation, recomputation; Hugging Face weights."""
