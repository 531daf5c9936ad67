"""All mutants."""
from . import attention, backward, based, channels, convolution, flex, hedgehog, linear, products, rows, steps, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *based.MUTANTS, *channels.MUTANTS, *convolution.MUTANTS,
           *flex.MUTANTS, *hedgehog.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS, *steps.MUTANTS,
           *tile.MUTANTS)
