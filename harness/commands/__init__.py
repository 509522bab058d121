"""What the commands of `harness.cli` do, except `bench matrix` (`harness.matrix`)."""
