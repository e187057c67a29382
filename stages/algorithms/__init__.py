"""The pure functions of RL: tensors in, tensors out. Importing this package imports no torch."""
