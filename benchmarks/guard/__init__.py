"""The scaling guard: `python -m benchmarks.guard`, or `make bench-guard`."""
