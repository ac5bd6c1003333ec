"""Planted faults of scaling: pools that do the right thing at the wrong cost.

Each stands on the allocator's public methods alone, so that it outlives changes inside. The guard has
to catch every one, by the layer named in `tests/test_guard.py`.
"""
