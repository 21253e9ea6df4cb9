"""Continuous-time and ODE-inspired RNNs: CfC, LTC, oscillators, waves."""
