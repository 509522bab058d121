"""The strategy `horovod` of bench, as a package that an entry point registers (docs/engines.md)."""
