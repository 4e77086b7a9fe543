"""Messages to frames and back: what the rest of the program needs of `encoder`, `decoder` and `head`.

A message is one to three frames: a head, ids, features. docs/protocol.md is the specification; golden vectors
hold both to it.
"""

from starsd_edge.protocol.decoder import decode
from starsd_edge.protocol.encoder import encode
from starsd_edge.protocol.head import Buffer, Frames
from starsd_edge.protocol.messages import kind_of

__all__ = ["Buffer", "Frames", "decode", "encode", "kind_of"]
