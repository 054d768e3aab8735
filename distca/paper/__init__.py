"""The DistCA paper's claims, checked with our simulator and planner."""
