"""Oracles, random inputs and process helpers that tests share."""
