"""`python -m dashboards.drill`: see the package's docstring."""

from __future__ import annotations

import sys

from dashboards.drill.clock import CLOCK

REAL_NOW_S = CLOCK.real_s()
CLOCK.install()  # before anything else is imported

from dashboards.drill.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], REAL_NOW_S))
