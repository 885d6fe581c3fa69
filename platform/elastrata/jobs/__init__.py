"""Runs as jobs of a Ray cluster: submitted, followed and stopped from elsewhere."""
