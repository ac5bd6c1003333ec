"""`python -m veloxquant_exporters.cli` is `vqmon`."""

from __future__ import annotations

from veloxquant_exporters.cli import main

main()
