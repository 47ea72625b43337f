"""What is known of a model's layers on each kind of device."""
