"""Execution of plans: exchanges, kernel calls and autograd."""
