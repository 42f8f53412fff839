"""Right."""
