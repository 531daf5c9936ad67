"""All mutants."""
from . import attention, backward, channels, linear, products, rows, steps, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *channels.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS,
           *steps.MUTANTS, *tile.MUTANTS)
