"""Passes over the flat program, some for XLA alone."""
