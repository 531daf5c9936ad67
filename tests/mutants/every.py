"""All mutants."""
from . import attention, backward, channels, linear, products, rows, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *channels.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS,
           *tile.MUTANTS)
