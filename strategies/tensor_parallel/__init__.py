"""`tp`: tensor parallelism within layers."""
