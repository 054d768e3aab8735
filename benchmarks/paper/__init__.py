"""The claims of the DistCA paper, checked with our simulator and planner."""
