"""Other libraries' kernels, called as tkq's are."""
