"""`local-sgd`: ranks train independently, and their parameters are averaged periodically."""
