"""The scheduler stage (engine core): decides which request computes what in each step; owns the KV block table."""
