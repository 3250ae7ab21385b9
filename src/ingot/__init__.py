"""ingot: from raw crawl files to a trained language model."""

__version__ = "0.1.0"
