"""Benchmarks: pytest-benchmark cases per operation and shape, and the target table measured in pairs."""
