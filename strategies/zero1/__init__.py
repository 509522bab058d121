"""`zero1`: torch's ZeroRedundancyOptimizer over `ddp`."""
