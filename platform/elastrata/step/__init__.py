"""One optimizer step: forward, backward, clipping, update and the record of it."""
