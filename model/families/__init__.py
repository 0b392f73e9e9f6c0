"""Model families of Hugging Face; importing the package registers them."""

from model.families import dots1, llama, mistral, mixtral, phi3, qwen3

__all__ = ["dots1", "llama", "mistral", "mixtral", "phi3", "qwen3"]
