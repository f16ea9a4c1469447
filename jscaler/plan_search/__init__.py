"""Planning by search: the fastest plan of a space that fits, and a bound of all others."""
