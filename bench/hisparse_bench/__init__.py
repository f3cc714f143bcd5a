"""Benchmarks of ``hisparse bench``; no time is shown unless a correctness check passed."""
