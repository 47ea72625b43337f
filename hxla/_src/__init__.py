"""What is behind the public names: README.md says where what is."""
