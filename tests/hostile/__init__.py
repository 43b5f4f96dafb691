"""Attacks on the listeners of a real service, and what a second, well-behaved client notices of them."""
