"""All mutants."""
from . import (
    attention,
    backward,
    based,
    channels,
    chunked,
    convolution,
    decode,
    fft_conv,
    flex,
    fp8_attention,
    hedgehog,
    linear,
    mla,
    pairs,
    products,
    recurrence,
    rows,
    steps,
    tile,
    wide,
)

MUTANTS = (*attention.MUTANTS, *backward.MUTANTS, *based.MUTANTS, *channels.MUTANTS, *chunked.MUTANTS,
           *convolution.MUTANTS, *decode.MUTANTS, *fft_conv.MUTANTS, *flex.MUTANTS, *fp8_attention.MUTANTS,
           *hedgehog.MUTANTS, *linear.MUTANTS, *mla.MUTANTS, *pairs.MUTANTS, *products.MUTANTS, *recurrence.MUTANTS,
           *rows.MUTANTS, *steps.MUTANTS, *tile.MUTANTS, *wide.MUTANTS)
