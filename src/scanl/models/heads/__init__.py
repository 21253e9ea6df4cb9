"""Heads on a stack: what a user trains, and the distributions of a number."""
