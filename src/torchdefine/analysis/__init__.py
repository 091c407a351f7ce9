"""Looking at embeddings and runs."""
