"""Small programs to start from; each says at its top how to run it."""
