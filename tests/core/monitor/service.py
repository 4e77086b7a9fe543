"""A program that publishes the made-up service of fleet.py: `service.py DEVICES [HZ]`, prints its endpoint."""

import sys
import time

import zmq
from fleet import service_after

from starsd_edge.monitor.publish import SnapshotPublisher


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
