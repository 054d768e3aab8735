"""From a layout to a proven plan: which server computes which piece of attention."""
