"""The paired comparison: two revisions side by side on the same devices, in blocks that alternate."""
