"""All mutants."""
from . import attention, backward, products, rows, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *products.MUTANTS, *rows.MUTANTS, *tile.MUTANTS)
