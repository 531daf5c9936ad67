"""tkq's benchmarks. They need a source checkout; `python -m tkq bench` finds them there."""
