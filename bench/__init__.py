"""Measurements of one part of the project each, against what it replaces: `python -m bench.head`."""
