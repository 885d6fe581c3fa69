"""Model families for Elastrata, which the engine finds through entry points."""
