"""Rollouts from SGLang servers: plug-in, process, client, weights. This package imports no JAX."""
