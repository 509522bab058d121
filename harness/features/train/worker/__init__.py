"""Training runs: the loop, its rules, and one run on a rank."""
