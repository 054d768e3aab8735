"""What a plan costs: work in pairs and FLOPs, kernel time from measured latencies, and bytes on the wire."""
