"""Measures of position and context in a basis, and the comparison of two bases."""
