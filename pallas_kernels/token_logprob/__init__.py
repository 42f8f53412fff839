"""Log-probs of given tokens, entropy and the best tokens, straight from hidden states and head."""
