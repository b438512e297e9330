"""Activations as mean + position + context + residual: sums that merge, one streaming loop, and the
basis they make."""
