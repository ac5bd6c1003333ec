"""What `vqmon check` does: looks at a metrics page, a snapshot folder or a trace, and changes nothing.

Importing this package loads no exporter library.
"""

from __future__ import annotations

from veloxquant_exporters.check.target import Checked, check

__all__ = ["Checked", "check"]
