"""What a conversion costs: distortion, perplexity, divergence, errors of layers, bandwidth."""
