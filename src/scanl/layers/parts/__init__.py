"""Parts of layers."""
