"""Benchmarks of placement: decisions, simulated and real replicas, what the service adds to a turn."""
