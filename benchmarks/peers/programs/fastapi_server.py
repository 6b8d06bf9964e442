"""Serve embeddings as one would by hand: FastAPI and sentence-transformers.

python fastapi_server.py MODEL PORT
"""

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
app = FastAPI()


class EmbedRequest(BaseModel):
    inputs: str


@app.post("/embed")
def embed(request: EmbedRequest):  # not `async`: FastAPI runs it in a thread, as its guide says
    return [model.encode(request.inputs, normalize_embeddings=True).tolist()]


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
