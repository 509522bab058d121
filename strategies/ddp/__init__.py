"""`ddp`: torch's DistributedDataParallel."""
