"""Jobs of a study on Kubernetes."""
