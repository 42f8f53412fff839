"""Wrong."""
