"""`vqmon top`: pools, memory and alerts on a terminal, from what exporters already publish.

    source (a folder, a metrics page, a trace) -> Moment -> History -> Board -> screens, text or JSON

Boards are made by pure functions of readings; the screens alone need Textual.
"""

from __future__ import annotations
