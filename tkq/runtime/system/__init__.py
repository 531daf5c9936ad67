"""Files and processes: what is trusted, locked, forked."""
