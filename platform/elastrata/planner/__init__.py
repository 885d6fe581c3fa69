"""The planner: memory, time and money of a run, computed before anything is rented."""
