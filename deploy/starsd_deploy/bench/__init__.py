"""Benchmarks of the deployer."""
