"""Reading guide to be written."""
