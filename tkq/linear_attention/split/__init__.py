"""Few long sequences: segments of a sequence side by side, and the states that each begins with."""
