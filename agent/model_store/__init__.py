"""The models on a node's disk: fetched by hashed chunks from whoever has them, kept within limits."""
