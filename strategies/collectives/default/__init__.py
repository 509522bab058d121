"""`default`: the backend's own all-reduce."""
