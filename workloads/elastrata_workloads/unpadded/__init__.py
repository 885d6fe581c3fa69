"""What models share that run on samples laid end to end, without padding."""
