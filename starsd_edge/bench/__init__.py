"""Benchmarks of the core, behind `starsd bench`."""
