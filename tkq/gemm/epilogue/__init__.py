"""What is done to a product's results before they are stored."""
from .spec import Epilogue, name_of
