"""What the user wrote: the model, the loss, the annotations."""
