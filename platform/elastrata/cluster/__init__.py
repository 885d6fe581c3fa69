"""The run time on Ray: workers, their channel to the driver, and the replacement of lost ones."""
