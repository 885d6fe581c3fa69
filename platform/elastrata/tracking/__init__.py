"""The record of a run in MLflow."""
