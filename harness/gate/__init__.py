"""The gate: baselines, nights and paired comparisons, and the removal of old studies."""
