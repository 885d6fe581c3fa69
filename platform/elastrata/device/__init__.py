"""What a device can do, and how data gets to it and back."""
