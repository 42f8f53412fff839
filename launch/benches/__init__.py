"""What `launch/bench.py` measures: one module per suite, each with `run(repeats) -> rows`."""
