"""The work of commands of `harness.cli`, except `bench matrix` (`harness.matrix`)."""
