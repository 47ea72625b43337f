"""Which job holds which devices: policies, a simulator, and live runs."""
