"""What the two ends say to each other: messages, their bytes, and who may say what when. No I/O.

`messages` are typed values, `codec` turns them into frames, `connection` holds a state machine for each side.
docs/protocol.md is the specification.
"""
