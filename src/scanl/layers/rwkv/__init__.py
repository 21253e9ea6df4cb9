"""AFT and RWKV."""
