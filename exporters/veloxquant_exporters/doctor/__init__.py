"""What `vqmon doctor` does: looks for what keeps pools from being watched, and says how to mend it.

It changes nothing. A check is a module of this folder with a function `find`, and a row in `checks`.
Nothing of `veloxquant_mlx` is imported before a check needs it: that package may be another's.
"""

from __future__ import annotations

from veloxquant_exporters.doctor.checks import CHECKS, Check, examine
from veloxquant_exporters.doctor.settings import Settings

__all__ = ["CHECKS", "Check", "Settings", "examine"]
