"""Broken."""
