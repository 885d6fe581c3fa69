"""Where runs go: cluster files, jobs of clusters elsewhere, machines that are taken away."""
