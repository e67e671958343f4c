"""What holds for all tests."""

import os

# As the engine sets it for its core: OpenMP's threads that spin for long take the cores from whatever runs
# beside the tests, and a step takes a hundred times as long then. torch reads it when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
