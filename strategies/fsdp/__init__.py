"""`fsdp`, `hsdp` and `manual`: torch's FSDP2."""
