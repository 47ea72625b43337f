"""Which job holds which devices: values and pure functions, and a simulator of them."""
