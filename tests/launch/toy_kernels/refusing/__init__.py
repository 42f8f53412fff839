"""Refusing."""
