"""All mutants."""
from . import attention, backward, based, channels, convolution, fft_conv, hedgehog, linear, products, rows, steps, tile

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *based.MUTANTS, *channels.MUTANTS, *convolution.MUTANTS,
           *fft_conv.MUTANTS, *hedgehog.MUTANTS, *linear.MUTANTS, *products.MUTANTS, *rows.MUTANTS, *steps.MUTANTS,
           *tile.MUTANTS)
