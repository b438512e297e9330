"""Attention scores as a sum of terms, and the share of each term in what a head attends to."""
