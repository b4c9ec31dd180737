"""Benchmarks of a whole service: ``wisp serve`` on this machine, and clients over HTTP."""
