"""The planner: memory, time and cost of a run, computed before any machine is rented."""
