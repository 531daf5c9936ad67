"""What ``python -m tkq`` runs."""
