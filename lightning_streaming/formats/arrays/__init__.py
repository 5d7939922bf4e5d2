"""Files of rows of equal size: .npy of NumPy, the tokens of Megatron-LM, and the lengths of arrays."""
