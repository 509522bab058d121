"""The gate: is a study slower, larger or different from another? Verdicts, and the formats that CI reads."""
