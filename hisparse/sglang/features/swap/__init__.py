"""Keeps pages of retracted requests in the store until their requests come back."""
