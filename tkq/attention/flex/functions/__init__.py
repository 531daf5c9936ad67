"""Functions of the user's: what they depend on, their graphs, and the derivatives of these."""
