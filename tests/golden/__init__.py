"""Outputs of other implementations, recorded once: the tests compare with them."""

from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"
"""JSON files; tests/tiny/make_golden.py writes those of the tiny models."""
