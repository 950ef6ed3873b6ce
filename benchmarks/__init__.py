"""Speed and memory, compared within one run: `make bench`."""
