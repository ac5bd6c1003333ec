"""Frozen copy of the allocator at 23c6c3bbfd18; see freeze_twin.py. Never edited."""
