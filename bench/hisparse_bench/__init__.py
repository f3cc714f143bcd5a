"""Benchmarks; every figure stands beside the correctness check that it passed."""
