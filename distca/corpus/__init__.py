"""Readers of users' files: document lengths for plans, tokens for training."""
