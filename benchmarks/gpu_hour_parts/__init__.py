"""The stages of `benchmarks/gpu_hour.py`, and what runs them."""
