"""The decoder: its shape, layers, loss, and how it is cut, compiled and loaded."""
