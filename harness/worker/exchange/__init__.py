"""The exchange group of a rank: what it counts and records."""
