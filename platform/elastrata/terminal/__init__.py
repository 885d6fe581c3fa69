"""What people see while something long is going on."""
