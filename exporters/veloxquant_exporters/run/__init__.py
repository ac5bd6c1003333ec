"""Run: a program of the user's, run in this process under its own `__main__`, and watched."""

from __future__ import annotations

from veloxquant_exporters.run.command_line import CommandError, Program, parse_command
from veloxquant_exporters.run.execute import execute
from veloxquant_exporters.run.outputs import Outputs, OutputSettings, start_outputs

__all__ = [
    "CommandError",
    "OutputSettings",
    "Outputs",
    "Program",
    "execute",
    "parse_command",
    "start_outputs",
]
