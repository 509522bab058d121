"""`scratch-fsdp`: ZeRO stages 1 to 3 on raw collectives."""
