"""Deployment: cluster files, jobs on remote clusters, machines that are preempted."""
