"""Rules that the linters check: contracts of imports, depth of inheritance."""
