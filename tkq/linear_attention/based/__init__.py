"""Based: linear attention with the Taylor series of exp, to the second order, as its feature map."""
