"""All that is known of the insides of jax and XLA."""
