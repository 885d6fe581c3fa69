"""The commands, one file each. A command imports heavy libraries only when it runs."""
