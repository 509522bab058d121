"""The training step, and what all strategies build on: the protocol, the optimizer, precision, clipping."""
