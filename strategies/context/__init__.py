"""Context parallelism: ranks that compute one sequence together, each a part of its tokens."""
