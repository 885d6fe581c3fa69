"""The commands, a file each. Heavy libraries are imported when a command runs."""
