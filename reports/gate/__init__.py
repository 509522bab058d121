"""The gate: is a study slower, larger or otherwise than another? Verdicts, and the faces that CI reads."""
