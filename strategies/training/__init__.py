"""The training step, and the parts that all strategies share: the protocol, precision, clipping."""
