"""What the two ends say to each other: messages, their bytes, and who may say what when. No I/O.

`messages` are typed values, `codec` turns them into frames; `edge_connection` and `server_connection` are the
state machines of the two sides, `states` their tables. docs/protocol.md is the specification.
"""
