"""Long convolutions through the Fourier transform: `tkq.fft_conv`."""
