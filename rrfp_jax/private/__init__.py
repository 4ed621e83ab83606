"""The private names of other libraries that this package cannot do without: one file for each library.

No other file imports any. Each file loads its own library only, so the launcher can use that of jaxlib and load no JAX.
"""
