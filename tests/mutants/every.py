"""All mutants."""
from . import attention, backward, linear, products, rows, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS, *tile.MUTANTS)
