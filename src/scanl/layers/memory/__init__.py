"""Matrix memories: linear attention, gated decays, delta rules, mLSTM."""
