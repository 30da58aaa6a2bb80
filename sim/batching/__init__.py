"""How prompts and decoding share the engine: `base` has the seam, then one file a kind."""

from sim.batching.base import PREFILLS
from sim.batching.chunked import Chunked
from sim.batching.disaggregated import Disaggregated
from sim.batching.exclusive import Exclusive

__all__ = ["PREFILLS", "Chunked", "Disaggregated", "Exclusive"]
