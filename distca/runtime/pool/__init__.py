"""Dedicated attention servers that come and go: who they are, what they owe, and how it is computed elsewhere."""
