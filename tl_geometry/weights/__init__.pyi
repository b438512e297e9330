from .geometry import weight_geometry as weight_geometry
from .probes import bias_readout as bias_readout
from .probes import embedding_distance_table as embedding_distance_table
from .probes import noun_probe as noun_probe
from .readout import token_readout as token_readout

__all__: list[str]
