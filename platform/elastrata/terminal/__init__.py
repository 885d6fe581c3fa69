"""Views of long-running work, for people."""
