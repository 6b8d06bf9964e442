def compare_embeddings(artifact, real): return None
