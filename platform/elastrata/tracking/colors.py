"""The colours of all pictures and reports."""

from __future__ import annotations

INK = "#1f2933"
"""Titles, labels."""
QUIET = "#7b8794"
"""Ticks, notes."""
GRID = "#e4e7eb"
BLUE = "#1769aa"
"""What a picture is about."""
PALE_BLUE = "#b8d4ee"
"""The same, unsmoothed or given up."""
RED = "#d1495b"
"""What to look at first: held-out losses, the best trial."""
GRAY = "#9aa5b1"
"""What came to nothing."""
