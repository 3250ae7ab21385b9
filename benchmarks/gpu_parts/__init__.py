"""The parts of benchmarks/train_gpu.py: models and layouts, contestants, the stress, pictures of streams, the page."""
