"""`topk`: the largest elements."""
