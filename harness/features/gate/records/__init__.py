"""The files of the gate: baselines and margins, nights, and the pairs of a comparison."""
