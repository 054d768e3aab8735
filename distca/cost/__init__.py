"""Costs of a plan: work in pairs and FLOPs, kernel seconds from measured latencies, and bytes sent."""
