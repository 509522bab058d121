"""`fp16` and `bf16`: half precision."""
