"""The driver of a run: starts Ray and the workers, records what they say, and ends them."""
