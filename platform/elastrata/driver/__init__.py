"""The driver of a run: starts Ray and the workers, records their events, and ends them."""
