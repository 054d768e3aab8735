"""Save, verify, resume and export checkpoints."""
