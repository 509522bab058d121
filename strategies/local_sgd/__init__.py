"""`local-sgd`: ranks train alone, and their parameters are averaged every so many steps."""
