"""Studies: one module per table, figure or benchmark, and the small laboratory that runs them."""
