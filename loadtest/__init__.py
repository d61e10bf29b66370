"""Load from outside: a small client (standard library only) and, in subpackages, the engine core's benchmarks."""
