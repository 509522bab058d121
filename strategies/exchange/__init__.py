"""Buckets of gradients, and the lane on which they are exchanged during the backward pass."""
