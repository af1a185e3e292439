"""Experiments: many runs that answer one question."""
