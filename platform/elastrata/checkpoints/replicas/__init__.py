"""The state of a run in the memory of other processes than its workers'."""
