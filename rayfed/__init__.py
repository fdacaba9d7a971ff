"""rayfed: federated fine-tuning and personalisation of CLIP and ViT adapters on Ray."""

__version__ = "0.1.0"
