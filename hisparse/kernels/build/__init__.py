"""Compiles the C++ and CUDA kernels on first use, or ahead of time."""
