"""`hierarchical`: inside of nodes and across them."""
