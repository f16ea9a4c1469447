"""Planning by search: of the plans of a space the one of least seconds within the memory, and a bound of all of them."""
