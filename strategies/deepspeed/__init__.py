"""`deepspeed`: DeepSpeed's own engine, where it is installed."""
