"""python -m starsd_edge is `starsd`."""

from starsd_edge.cli.main import main

if __name__ == "__main__":
    main()
