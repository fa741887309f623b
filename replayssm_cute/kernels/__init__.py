"""CuTe DSL kernels. Importing a module below this package imports the DSL; nothing else does."""
