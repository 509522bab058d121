"""`torch-powersgd`: the hook of torch."""
