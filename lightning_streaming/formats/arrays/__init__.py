"""Files of rows of equal size: .npy of NumPy, and the tokens of Megatron-LM."""
