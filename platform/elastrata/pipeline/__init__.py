"""A model divided into the stages of a pipeline, and the passes of micro-batches through them."""
