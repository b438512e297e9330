"""A norm layer as a projection onto a sphere, and the paths of tokens along it."""
