"""Panels: boards as styled text of a given width; the screens and the plain frame share them."""

from __future__ import annotations
