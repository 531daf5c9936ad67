"""What tests, the demo and the bench share. ``expectation`` and ``sass`` need neither torch nor the DSL."""
