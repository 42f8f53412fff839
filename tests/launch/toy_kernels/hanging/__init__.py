"""Hanging."""
