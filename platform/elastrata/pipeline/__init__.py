"""A model cut into the stages of a pipeline, and how micro-batches pass through them."""
