"""One optimizer step: forward, backward, clip, update, and what is recorded of it."""
