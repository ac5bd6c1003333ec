"""The screens of `vqmon top`, on Textual: keys, resizing, the terminal. What they show is in `panels`."""

from __future__ import annotations
