"""The training itself: step, loop and what they are made of. Knows neither Ray nor MLflow."""
