"""`tree`: up and down two binary trees."""
