"""Runs on workers that come and go, in simulated time."""
