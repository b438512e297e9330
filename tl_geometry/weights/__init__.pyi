from .bilinear import Factors as Factors
from .heads import TokenReadout as TokenReadout
from .heads import WeightGeometry as WeightGeometry
from .heads import token_readout as token_readout
from .heads import weight_geometry as weight_geometry
from .probes import bias_readout as bias_readout
from .probes import embedding_distance_table as embedding_distance_table
from .probes import noun_probe as noun_probe

__all__: list[str]
