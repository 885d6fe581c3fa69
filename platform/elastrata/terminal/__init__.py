"""The views that people see while something long is going on."""
