"""From a plan to what one rank sends, receives and computes."""
