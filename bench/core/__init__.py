"""What every file of cases shares: inputs, timing, results, the command line."""
