"""W_QK and W_OV in the geometry of a basis: structure, factor SVDs, token readouts, probes."""
