"""Simulate: what another configuration of the pool would have done with a recorded trace."""

from __future__ import annotations

from veloxquant_exporters.simulate.advice import Advice, advise
from veloxquant_exporters.simulate.grid import Grid, GridError
from veloxquant_exporters.simulate.result import Result
from veloxquant_exporters.simulate.tally import simulate
from veloxquant_exporters.simulate.workers import simulate_all

__all__ = ["Advice", "Grid", "GridError", "Result", "advise", "simulate", "simulate_all"]
