"""Compressors: one class in each file."""
