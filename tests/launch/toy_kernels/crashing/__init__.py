"""Crashing."""
