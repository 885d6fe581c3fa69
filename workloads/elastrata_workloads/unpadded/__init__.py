"""Parts that models share which run on samples laid end to end, without padding."""
