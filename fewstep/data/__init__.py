"""Prompts, images and digits, and the order in which a run reads them."""
