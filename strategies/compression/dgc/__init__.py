"""`dgc`: deep gradient compression."""
