"""The run time on Ray: the driver, its workers, what is between them, and what replaces them."""
