"""Softmax attention, for hybrids."""

from scanl.layers.attention.attention import Attention as Attention
