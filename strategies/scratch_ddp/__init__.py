"""`scratch-ddp`: data parallelism on raw collectives."""
