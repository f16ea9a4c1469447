"""What runs: arguments, executables and their dispatch, training state, modules; what a target compiles."""
