"""Train a decoder with attention disaggregated over the ranks: settings, launching, model, data, checkpoints."""
