"""What the gate compares with: baselines, nights, paired comparisons, and their removal."""
