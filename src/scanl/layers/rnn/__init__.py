"""Gated, orthogonal and other nonlinear RNNs."""
