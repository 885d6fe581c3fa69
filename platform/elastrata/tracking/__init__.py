"""The tracking record of a run in MLflow."""
