"""Predict training steps on clusters that need not exist: timelines from plans, measured costs and links."""
