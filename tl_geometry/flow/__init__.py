"""Trajectories of tokens through the layers as a stochastic flow: rotation, stretch and noise."""
