"""Publishes the made-up service of fleet.py and prints its endpoint: arguments DEVICES [HZ]."""

import sys
import time

import zmq

from starsd_edge.monitor.publish import SnapshotPublisher

from .fleet import service_after


def main() -> None:
    devices, hertz = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 2.0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = SnapshotPublisher(context, "tcp://127.0.0.1:*")
    print(publisher.endpoint, flush=True)  # noqa: T201
    number = 0
    while True:
        number += 1
        publisher.publish(service_after(100 + number * 0.5, devices))  # each snapshot is half a second later
        time.sleep(1 / hertz)


if __name__ == "__main__":
    main()
