"""What runs inside SGLang. Imports torch and SGLang, never JAX."""
