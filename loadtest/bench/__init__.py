"""What the engine core's benchmarks share: a stack of real stages around an executor that only keeps time."""
