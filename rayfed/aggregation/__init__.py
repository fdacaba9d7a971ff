"""Rules that combine client updates: pure functions and sums on flat tensors."""
