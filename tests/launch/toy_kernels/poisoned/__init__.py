"""Poisoned."""
