"""The link in sockets: keys and trust, ZeroMQ options paid for in blood, and the drafter at the other end.

`client.RemoteDrafter` is what the decode loop uses; `sockets` and `zap` are also the service's gateway's.
"""
