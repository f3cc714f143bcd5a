"""The Optimizer: replays traces of requests through caches, and says what capacity they need."""
