"""`signsgd`: one bit an element."""
