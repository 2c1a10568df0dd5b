"""Sampling answers and scoring them."""
