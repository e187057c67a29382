"""The built-in stages of RL post-training. They use the same contract as a user's own."""
