"""Train a decoder with disaggregated attention: settings, launcher, model, data and checkpoints."""
