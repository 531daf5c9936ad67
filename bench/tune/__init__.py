"""What the plans' tables were made with."""
