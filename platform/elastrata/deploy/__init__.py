"""Clusters before there are any: what a cluster file can ever provide."""
