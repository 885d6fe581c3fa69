"""Spot machines: notices that a machine will be taken away, and the drain of its Ray nodes."""
