"""What tests know of the package's insides, a file for each room: nothing else names them."""
