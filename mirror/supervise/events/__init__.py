"""Events of a service: their kinds, and the file that keeps them."""
