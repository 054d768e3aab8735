"""What a step would take on a cluster that nobody has rented yet: timelines from plans, measured costs and links."""
