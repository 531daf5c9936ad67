"""All mutants."""
from . import attention, backward, linear, products, rows, steps, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS, *steps.MUTANTS,
           *tile.MUTANTS)
