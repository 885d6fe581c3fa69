"""Model families for Elastrata, found by the engine through entry points."""
